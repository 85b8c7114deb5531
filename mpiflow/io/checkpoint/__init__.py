"""Checkpoints: a folder per step, a file per rank that writes, one manifest that makes it complete.

write      each rank its slices, then rank 0 the manifest and the final name
read       the newest that is complete, whether it fits the plan, and the slices that a rank needs
manifest   what a folder holds, as text, and every check on reading it
"""
