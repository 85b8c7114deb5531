"""Decoder transformers: GPT-2 (Radford et al. 2019) and Llama 2 (Touvron et al. 2023), by shape.

Every block reads x through a norm and adds to it: attention, then a feed-forward layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import mpiflow as mf
from mpiflow import nn
from mpiflow.graph.graph import Hint
from mpiflow.models.choose import chosen


@dataclass(frozen=True, slots=True)
class GPT:
    """A decoder; called on tokens (n, t), it gives the logits of what follows each, (n, t, v).

    Positions are learned, or rotary where `rotary_base` is given. `axis` names an axis of the mesh
    that splits heads, hidden dims and the vocabulary.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024
    kv_heads: int | None = None
    hidden: int | None = None
    rotary_base: float | None = None
    gated: bool = False
    rms: bool = False
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    dtype: str = "float32"
    axis: str | None = None

    def __call__(self, tokens: mf.Tensor) -> mf.Tensor:
        """The logits (n, t, vocabulary)."""
        table = self._table("tokens")
        x = table(tokens)
        if self.rotary_base is None:
            x = nn.Positions(self.context, name="positions")(x)
        x = mf.dropout(x, self.dropout)
        for i in range(self.layers):
            x = self._block(x, f"block{i}")
        x = self._norm("norm")(x)
        return table.as_logits(x) if self.tied else self._table("head").as_logits(x)

    def loss(self, tokens: mf.Tensor) -> mf.Tensor:
        """The mean cross entropy of tokens[:, 1:], each predicted from those before it."""
        t = tokens.shape[1] - 1
        logits = self(mf.cut(tokens, 0, t, dim=1))
        return mf.mean(mf.cross_entropy(logits, mf.cut(tokens, 1, t + 1, dim=1)))

    def _block(self, x: mf.Tensor, name: str) -> mf.Tensor:
        # The sum of 2 x layers outputs starts with the deviation of one, as in GPT-2.
        init, out_init = nn.normal(0.02), nn.normal(0.02 / sqrt(2 * self.layers))
        attention = nn.MultiHeadAttention(
            self.width, self.heads, kv_heads=self.kv_heads, causal=True, bias=self.bias,
            rotary_base=self.rotary_base, dropout=self.dropout, init=init, out_init=out_init,
            axis=self.axis, name=f"{name}.attention",
        )  # fmt: skip
        feed_forward = nn.FeedForward(
            self.hidden or 4 * self.width, activation=mf.silu if self.gated else _gelu,
            gated=self.gated, bias=self.bias, init=init, out_init=out_init, axis=self.axis,
            name=f"{name}.feed_forward",
        )  # fmt: skip
        x = x + mf.dropout(attention(self._norm(f"{name}.norm1")(x)), self.dropout)
        return x + mf.dropout(feed_forward(self._norm(f"{name}.norm2")(x)), self.dropout)

    def _norm(self, name: str) -> nn.RMSNorm | nn.LayerNorm:
        return nn.RMSNorm(epsilon=1e-5, name=name) if self.rms else nn.LayerNorm(name=name)

    def _table(self, name: str) -> nn.Embedding:
        sbp: Hint | None = {self.axis: mf.S(0)} if self.axis else None
        return nn.Embedding(self.vocabulary, self.width, name=name, dtype=self.dtype, sbp=sbp)


def _gelu(x: mf.Tensor) -> mf.Tensor:
    return mf.gelu(x, approximate=True)


SIZES = {
    "tiny": GPT(2, 64, 4, vocabulary=256, context=32),
    "small": GPT(12, 768, 12),
    "medium": GPT(24, 1024, 16),
    "large": GPT(36, 1280, 20),
    "xl": GPT(48, 1600, 25),
    "70b": GPT(
        80, 8192, 64, vocabulary=32000, context=4096, kv_heads=8, hidden=28672,
        rotary_base=10000.0, gated=True, rms=True, bias=False, tied=False,
    ),
}  # fmt: skip
"""GPT-2's sizes, Llama-2-70B's shape, and one that trains in seconds on a laptop."""


def gpt(size: str = "small", vocabulary: int = 0, *, axis: str | None = None) -> GPT:
    """A decoder of one of `SIZES`, with its own vocabulary or the given one."""
    shape = chosen("size", size, SIZES)
    return replace(shape, vocabulary=vocabulary or shape.vocabulary, axis=axis)
