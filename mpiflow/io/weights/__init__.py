"""Weights in the formats of others, and the names that others give them.

tensors      what all of these have in common: named tensors, read by box
safetensors  the format of Hugging Face, as one file or several
npz          NumPy's
source       which of them a path names; a run or a checkpoint is one too
pattern      how the dims of a tensor are arranged in a variable: "(r h d) i -> i (h r d)"
names        from our names to theirs; builtin has the maps that come with mpiflow
first        the variables of a new run: what fills them, checked, and the filling
export       from a checkpoint to a file
"""
