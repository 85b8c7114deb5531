"""Layers: they own names and make the variables that they use."""

from mpiflow.nn.base import Initializer, Layer, constant, normal, uniform, variable
from mpiflow.nn.dense import Dense

__all__ = ["Dense", "Initializer", "Layer", "constant", "normal", "uniform", "variable"]
