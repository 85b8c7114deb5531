"""Layers: they own names and make the variables that they use."""

from mpiflow.nn.base import Initializer, Layer, constant, normal, uniform, variable
from mpiflow.nn.conv import Conv
from mpiflow.nn.dense import Dense
from mpiflow.nn.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from mpiflow.nn.pool import GlobalMaxPool, GlobalMeanPool, MaxPool, MeanPool

__all__ = [
    "BatchNorm", "Conv", "Dense", "GlobalMaxPool", "GlobalMeanPool", "GroupNorm", "Initializer",
    "Layer", "LayerNorm", "MaxPool", "MeanPool", "RMSNorm", "constant", "normal", "uniform",
    "variable",
]  # fmt: skip
