"""A recommender (Cheng et al. 2016): a wide linear part and a deep part over embedded ids.

    wide:  one weight for each id, one for each number        \\
    deep:  rows of the ids and numbers -> hidden layers -> 1  -> sum -> probability of a click
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mpiflow as mf
from mpiflow import nn
from mpiflow.graph.graph import Hint

BUCKETS = 32
"""Of the histograms of predictions, from which `auc` is found."""


@dataclass(frozen=True, slots=True)
class WideDeep:
    """Called on ids, one tensor (n,) a table, and numbers (n, k), it gives logits (n,).

    `tables` are the rows of each table. Those with more rows than a step has ids are large: their
    rows are split over all ranks, and they are updated by rows, the lazy form of most optimizers
    (see nn.Embedding), unless `sparse` is None.
    """

    tables: tuple[int, ...]
    width: int = 16
    hidden: tuple[int, ...] = (256, 128)
    dtype: str = "float32"
    sparse: bool | None = True

    def __call__(self, ids: Sequence[mf.Tensor], numbers: mf.Tensor) -> mf.Tensor:
        """The logits (n,)."""
        x = mf.concat([*self._rows("deep", self.width, ids), numbers])
        for i, width in enumerate(self.hidden):
            x = mf.relu(nn.Dense(width, name=f"deep{i}")(x))
        logits = nn.Dense(1, name="deep")(x) + nn.Dense(1, bias=False, name="wide")(numbers)
        for weights in self._rows("wide", 1, ids):
            logits = logits + weights
        return mf.reshape(logits, (logits.shape[0],))

    def _rows(self, part: str, width: int, ids: Sequence[mf.Tensor]) -> list[mf.Tensor]:
        found = []
        for i, (rows, index) in enumerate(zip(self.tables, ids, strict=True)):
            large = rows > index.shape[0]
            sbp: Hint | None = mf.S(0) if large else None
            sparse = self.sparse if large else None
            table = nn.Embedding(
                rows, width, name=f"{part}_table{i}", dtype=self.dtype, sbp=sbp, sparse=sparse
            )
            found.append(table(index))
        return found


def histograms(logits: mf.Tensor, label: mf.Tensor) -> dict[str, mf.Tensor]:
    """Totals of clicks and of the others by predicted probability, outputs for an evaluation."""
    bucket = mf.cast(mf.sigmoid(logits) * float(BUCKETS), "int32")
    hits = mf.one_hot(mf.clip(bucket, high=BUCKETS - 1), BUCKETS)
    click = mf.reshape(mf.cast(label, "float32"), (-1, 1))
    outputs: dict[str, mf.Tensor] = {}
    for name, weight in (("click", click), ("other", 1.0 - click)):
        counts = mf.unstack(mf.reduce_sum(hits * weight, 0))
        outputs |= {f"{name}{i:02}": mf.total(count) for i, count in enumerate(counts)}
    return outputs


def auc(evaluation: Mapping[str, float]) -> float:
    """The area under the ROC curve, from the outputs of an evaluation; 0.5 for mere chance.

    It is the probability that a click was predicted above another row, and pairs in the same
    bucket count a half.
    """
    clicks = [evaluation[f"click{i:02}"] for i in range(BUCKETS)]
    others = [evaluation[f"other{i:02}"] for i in range(BUCKETS)]
    below = [sum(others[:i]) + others[i] / 2 for i in range(BUCKETS)]
    above = sum(click * n for click, n in zip(clicks, below, strict=True))
    return above / (sum(clicks) * sum(others))
