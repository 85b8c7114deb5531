"""BERT (Devlin et al. 2019): an encoder, with heads for masked tokens and for the next sentence.

Every block adds to x and norms the sum: attention, then a feed-forward layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mpiflow as mf
from mpiflow import nn
from mpiflow.graph.graph import Hint
from mpiflow.models.choose import chosen

PAD = 0
"""The token that attention passes over."""
IGNORED = -1
"""The label of tokens that are not to be predicted."""


@dataclass(frozen=True, slots=True)
class BERT:
    """An encoder; called on tokens and segments (n, t), it gives (n, t, width).

    `axis` names an axis of the mesh that splits heads, hidden dims and the vocabulary.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 30522
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    dtype: str = "float32"
    axis: str | None = None

    def __call__(self, tokens: mf.Tensor, segment: mf.Tensor) -> mf.Tensor:
        """What the encoder makes of each token, (n, t, width)."""
        return self._encode(self._words(), tokens, segment)

    def heads_of(
        self, tokens: mf.Tensor, segment: mf.Tensor, positions: mf.Tensor | None = None
    ) -> tuple[mf.Tensor, mf.Tensor]:
        """Logits of each token (n, t, vocabulary), by the tied table, and of the order (n, 2).

        With `positions` (n, k) those of the tokens there, (n, k, vocabulary): a sixth of the work
        where 15 % of the tokens are to be predicted.
        """
        words = self._words()
        x = self._encode(words, tokens, segment)
        h = x if positions is None else mf.gather(x, positions)
        h = self._norm("masked.norm")(mf.gelu(self._dense(self.width, "masked.dense")(h)))
        zero = nn.constant(0.0)
        bias = nn.variable("masked.bias", (self.vocabulary,), zero, dtype=self.dtype)
        masked = words.as_logits(h) + bias
        first = mf.reshape(mf.cut(x, 0, 1, dim=1), (x.shape[0], self.width))
        pooled = mf.tanh(self._dense(self.width, "pooler")(first))
        return masked, self._dense(2, "next")(pooled)

    def losses(
        self,
        tokens: mf.Tensor,
        segment: mf.Tensor,
        label: mf.Tensor,
        follows: mf.Tensor,
        positions: mf.Tensor | None = None,
    ) -> tuple[mf.Tensor, mf.Tensor]:
        """Mean cross entropies: of the tokens whose label is not IGNORED, and of the order.

        The labels are those of all tokens (n, t), or of the tokens at `positions` (n, k).
        """
        masked, order = self.heads_of(tokens, segment, positions)
        return (
            mf.mean_cross_entropy(masked, label, ignore=IGNORED),
            mf.mean(mf.cross_entropy(order, follows)),
        )

    def _words(self) -> nn.Embedding:
        sbp: Hint | None = {self.axis: mf.S(0)} if self.axis else None
        return nn.Embedding(self.vocabulary, self.width, name="words", dtype=self.dtype, sbp=sbp)

    def _encode(self, words: nn.Embedding, tokens: mf.Tensor, segment: mf.Tensor) -> mf.Tensor:
        kinds = nn.Embedding(self.segments, self.width, name="segments", dtype=self.dtype)
        x = nn.Positions(self.positions, name="positions")(words(tokens) + kinds(segment))
        x = mf.dropout(self._norm("norm")(x), self.dropout)
        mask = mf.not_equal(tokens, PAD)
        for i in range(self.layers):
            x = self._block(x, mask, f"block{i}")
        return x

    def _block(self, x: mf.Tensor, mask: mf.Tensor, name: str) -> mf.Tensor:
        attention = nn.MultiHeadAttention(
            self.width, self.heads, dropout=self.dropout, init=nn.normal(0.02), axis=self.axis,
            name=f"{name}.attention",
        )  # fmt: skip
        feed_forward = nn.FeedForward(
            4 * self.width, init=nn.normal(0.02), axis=self.axis, name=f"{name}.feed_forward"
        )
        y = mf.dropout(attention(x, mask=mask), self.dropout)
        x = self._norm(f"{name}.norm1")(x + y)
        y = mf.dropout(feed_forward(x), self.dropout)
        return self._norm(f"{name}.norm2")(x + y)

    def _dense(self, width: int, name: str) -> nn.Dense:
        return nn.Dense(width, init=nn.normal(0.02), name=name)

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=1e-12, name=name)


SIZES = {
    "tiny": BERT(2, 64, 4, vocabulary=256, positions=33, dropout=0.0),
    "base": BERT(12, 768, 12),
    "large": BERT(24, 1024, 16),
}
"""The published sizes, and one that trains in minutes on a laptop."""


def bert(size: str = "base", vocabulary: int = 0, *, axis: str | None = None) -> BERT:
    """An encoder of one of `SIZES`, with its own vocabulary or the given one."""
    shape = chosen("size", size, SIZES)
    return replace(shape, vocabulary=vocabulary or shape.vocabulary, axis=axis)
