"""Regression on volumes: CosmoFlow (Mathuriya et al. 2018) finds numbers that a field follows from.

[Conv 3x3x3, leaky relu, pool 2] x n  ->  Dense, Dense  ->  Dense: the numbers
"""

from __future__ import annotations

from dataclasses import dataclass

import mpiflow as mf
from mpiflow import nn


@dataclass(frozen=True, slots=True)
class Field:
    """Called on volumes (n, c, depth, height, width) of floats, it gives (n, numbers).

    There are `pools` convolutions, each followed by a pool that halves every side; the first has
    `width` channels, each later one twice as many up to 256.
    """

    numbers: int
    pools: int = 5
    width: int = 16
    hidden: tuple[int, ...] = (128, 64)
    dropout: float = 0.0

    def __call__(self, x: mf.Tensor) -> mf.Tensor:
        """The numbers (n, numbers)."""
        for i in range(self.pools):
            channels = min(self.width << i, 256)
            x = _leaky(nn.Conv(channels, 3, padding="same", name=f"conv{i}")(x))
            x = mf.max_pool(x, 2)
        x = mf.reshape(x, (x.shape[0], -1))
        for i, width in enumerate(self.hidden):
            x = _leaky(nn.Dense(width, name=f"dense{i}")(x))
            x = mf.dropout(x, self.dropout)
        return nn.Dense(self.numbers, name="numbers")(x)


def _leaky(x: mf.Tensor) -> mf.Tensor:
    return mf.maximum(x, x * 0.3)
