"""Optimizers: they add the update of every trainable variable to the training graph."""

from mpiflow.optim.adam import LAMB, Adam, AdamW
from mpiflow.optim.base import NO_DECAY, Group, Optimizer, average_name
from mpiflow.optim.sgd import LARS, SGD, Adagrad

__all__ = [
    "LAMB", "LARS", "NO_DECAY", "SGD", "Adagrad", "Adam", "AdamW", "Group", "Optimizer",
    "average_name",
]  # fmt: skip
