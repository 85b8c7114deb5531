"""SGD, LARS and Adagrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiflow.errors import JobError
from mpiflow.ops.random import Fill
from mpiflow.ops.update import AdagradUpdate, LarsUpdate, SgdUpdate
from mpiflow.optim.base import One, Optimizer


@dataclass(frozen=True, slots=True, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent.

    m' = momentum m + g + weight_decay w; w' = w - lr m', or with `nesterov`
    w' = w - lr (g + weight_decay w + momentum m'). On rows of a table (see nn.Embedding) momentum
    and weight decay of rows that a step does not look up stand still; without both, nothing does.
    """

    momentum: float = 0.0
    nesterov: bool = False
    rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise JobError("SGD: nesterov needs a momentum above 0")

    def drifting(self, weight_decay: float) -> tuple[str, ...]:
        own = ("momentum",) if self.momentum else ()
        return own + Optimizer.drifting(self, weight_decay)

    def _update(self, one: One) -> None:
        op = SgdUpdate(
            momentum=float(self.momentum),
            weight_decay=one.weight_decay,
            nesterov=self.nesterov,
            **one.settings,
        )
        rate = (one.rate(),)
        if self.momentum:
            one.add(op, rate, one.keep("momentum"))
        else:
            one.add(op, rate)


@dataclass(frozen=True, slots=True, repr=False)
class LARS(Optimizer):
    """Layer-wise adaptive rates (You, Gitman, Ginsburg 2017), for large batches.

    rate = lr trust |w| / (|g| + weight_decay |w|) for each variable, or lr where a norm is 0;
    m' = momentum m + rate (g + weight_decay w); w' = w - m'. See NO_DECAY for norms and biases.
    """

    momentum: float = 0.9
    trust: float = 0.001
    norms: ClassVar[bool] = True

    def _update(self, one: One) -> None:
        decay = one.weight_decay
        op = LarsUpdate(momentum=float(self.momentum), weight_decay=decay, **one.settings)
        if one.group.adapt:
            rate = one.adapted_rate(one.gradient_squares(), float(self.trust), decay)
        else:
            rate = one.rate()
        one.add(op, (rate,), one.keep("momentum"))


@dataclass(frozen=True, slots=True, repr=False)
class Adagrad(Optimizer):
    """s' = s + g^2; w' = w - lr g / (sqrt(s') + eps) (Duchi, Hazan, Singer 2011).

    Without weight decay it is the same on rows of a table as on all of it; see nn.Embedding.
    """

    eps: float = 1e-10
    start: float = 0.0
    """What the sums of squares begin with."""
    rows: ClassVar[bool] = True

    def _update(self, one: One) -> None:
        op = AdagradUpdate(eps=float(self.eps), weight_decay=one.weight_decay, **one.settings)
        weight = one.weight
        start = Fill(weight.shape, float(self.start), weight.dtype)
        one.add(op, (one.rate(),), one.keep("squares", start))
