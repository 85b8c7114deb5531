"""Data sets and checkpoints in HDF5."""
