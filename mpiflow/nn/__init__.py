"""Layers: they own names and make the variables that they use."""

from mpiflow.nn.attention import FeedForward, MultiHeadAttention
from mpiflow.nn.base import Initializer, Layer, constant, normal, uniform, variable
from mpiflow.nn.conv import Conv
from mpiflow.nn.dense import Dense
from mpiflow.nn.dropout import Dropout
from mpiflow.nn.embedding import Embedding, Positions
from mpiflow.nn.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from mpiflow.nn.pool import GlobalMaxPool, GlobalMeanPool, MaxPool, MeanPool
from mpiflow.nn.recurrent import GRU, LSTM

__all__ = [
    "GRU", "LSTM", "BatchNorm", "Conv", "Dense", "Dropout", "Embedding", "FeedForward",
    "GlobalMaxPool", "GlobalMeanPool", "GroupNorm", "Initializer", "Layer", "LayerNorm",
    "MaxPool", "MeanPool", "MultiHeadAttention", "Positions", "RMSNorm", "constant", "normal",
    "uniform", "variable",
]  # fmt: skip
