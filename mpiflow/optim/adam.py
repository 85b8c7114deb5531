"""Adam and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from mpiflow.errors import JobError
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Tensors
from mpiflow.ops.update import AdamSquares, AdamUpdate
from mpiflow.optim.base import One, Optimizer


@dataclass(frozen=True, slots=True, repr=False)
class Adam(Optimizer):
    """Adaptive moments (Kingma, Ba 2014), in PyTorch's form.

    m and v average the gradient and its square, with `betas`; corrected for their start at 0, they
    give w' = w - lr m / (sqrt(v) + eps). Weight decay is added to the gradient.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: ClassVar[bool] = False
    rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise JobError(
                    f"{type(self).__name__}: betas must be at least 0 and below 1, not {self.betas}"
                )

    def drifting(self, weight_decay: float) -> tuple[str, ...]:
        return ("moments", *Optimizer.drifting(self, weight_decay))

    def _update(self, one: One) -> None:
        op = self._op(one)
        corrections = one.correction(op.beta1), one.correction(op.beta2)
        moments = one.keep("moment1"), one.keep("moment2")
        rate = self._rate(one, op, corrections, moments)
        one.add(op, (rate, *corrections), *moments)

    def _op(self, one: One) -> AdamUpdate:
        return AdamUpdate(
            beta1=float(self.betas[0]),
            beta2=float(self.betas[1]),
            eps=float(self.eps),
            weight_decay=one.weight_decay,
            decoupled=self.decoupled,
            **one.settings,
        )

    def _rate(self, one: One, op: AdamUpdate, corrections: Tensors, moments: Tensors) -> Tensor:
        return one.rate()


@dataclass(frozen=True, slots=True, repr=False)
class AdamW(Adam):
    """Adam whose weight decay is apart from the gradient (Loshchilov, Hutter 2017).

    w' = w - lr (m / (sqrt(v) + eps) + weight_decay w).
    """

    weight_decay: float = field(default=0.01, kw_only=True)
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, repr=False)
class LAMB(AdamW):
    """AdamW with a rate for each variable (You et al. 2019), for large batches.

    w' = w - lr |w| / |u| u with u = m / (sqrt(v) + eps) + weight_decay w, or w - lr u where a norm
    is 0. See NO_DECAY for norms and biases.
    """

    eps: float = 1e-6
    norms: ClassVar[bool] = True
    rows: ClassVar[bool] = False

    def _rate(self, one: One, op: AdamUpdate, corrections: Tensors, moments: Tensors) -> Tensor:
        if not one.group.adapt:
            return one.rate()
        settings = {f.name: getattr(op, f.name) for f in fields(op)} | {"ema": 0.0}
        inputs = one.weight, one.values, *corrections, *one.factor(), *moments
        return one.adapted_rate(one.node(AdamSquares(**settings), *inputs)[0])
