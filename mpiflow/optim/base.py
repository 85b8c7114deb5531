"""What all optimizers share: the rate, groups of variables, clipping, averages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields, replace
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any, ClassVar, Self

from mpiflow.errors import JobError
from mpiflow.graph.graph import Graph, Variable
from mpiflow.graph.op import Op
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.gradnorm import TrustRatio
from mpiflow.ops.random import Fill
from mpiflow.ops.rowupdate import by_rows
from mpiflow.ops.schedule import Schedule
from mpiflow.ops.shape import Identity
from mpiflow.ops.update import Update
from mpiflow.optim.rows import Gradient, Rows
from mpiflow.optim.scalars import Scalars

GRADIENT_NORM = "gradient_norm"
"""The output that clipping adds to a training step: the norm before it."""


AVERAGE = "average"


def average_name(variable: str) -> str:
    """The name of the variable that averages another, with `ema`."""
    return f"{variable}.{AVERAGE}"


def _check_number(owner: Any, name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value < 0 or not isfinite(value):
        raise JobError(
            f"{type(owner).__name__}: {name} must be a number that is not negative, not {value!r}"
        )


def _shown(record: Any) -> str:
    """The settings that are not the default; plans and checkpoints carry this text."""
    shown = (
        f"{f.name}={getattr(record, f.name)!r}"
        for f in fields(record)
        if getattr(record, f.name) != f.default
    )
    return f"{type(record).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False)
class Group:
    """Other settings for the variables whose name matches `pattern` ("*.bias"), the first in order.

    With `dims`, only for those of at most so many dims. `adapt=False`: LARS and LAMB do not scale
    their rate by norms.
    """

    pattern: str
    weight_decay: float | None = None
    lr_scale: float = 1.0
    adapt: bool = True
    dims: int | None = None

    def __post_init__(self) -> None:
        _check_number(self, "lr_scale", self.lr_scale)
        if self.weight_decay is not None:
            _check_number(self, "weight_decay", self.weight_decay)

    def __repr__(self) -> str:
        return _shown(self)

    def has(self, variable: Variable) -> bool:
        """Whether the variable is one of this group's, if no earlier group has it."""
        few = self.dims is None or variable.tensor.ndim <= self.dims
        return few and fnmatchcase(variable.name, self.pattern)


NO_DECAY = Group("*", weight_decay=0.0, adapt=False, dims=1)
"""No weight decay, and no rate by norms, for norms and biases: variables of at most one dim."""


@dataclass(frozen=True, slots=True, repr=False)
class Optimizer:
    """Base of optimizers; subclasses add their numbers and write `_update`.

    `clip` bounds the norm of all gradients together (0: no bound), and gives that norm as an output
    "gradient_norm" of each training step. `ema` keeps an average of every weight in a variable
    NAME.average, which evaluations use: average' = ema average + (1 - ema) weight'.
    """

    lr: float | Schedule
    _: KW_ONLY
    weight_decay: float = 0.0
    groups: tuple[Group, ...] = ()
    clip: float = 0.0
    ema: float = 0.0
    norms: ClassVar[bool] = False
    """Whether a gradient has other readers than the update."""
    rows: ClassVar[bool] = False
    """Whether some rows of a table can be updated without the others."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" or (field.name == "lr" and not isinstance(value, Schedule)):
                _check_number(self, field.name, value)
        if self.ema >= 1:
            raise JobError(f"{type(self).__name__}: ema must be below 1, not {self.ema!r}")
        if not isinstance(self.groups, tuple) or not all(isinstance(g, Group) for g in self.groups):
            raise JobError(
                f"{type(self).__name__}: groups is a tuple of mf.Group, not {self.groups!r}"
            )

    def __repr__(self) -> str:
        return _shown(self)

    def over(self, steps: int) -> Self:
        """This optimizer for a run of so many steps, which a schedule may need to know."""
        return replace(self, lr=self.lr.over(steps)) if isinstance(self.lr, Schedule) else self

    def drifting(self, weight_decay: float) -> tuple[str, ...]:
        """What changes a weight even while its gradient is zero."""
        return ("weight decay",) if weight_decay else ()

    def decay_of(self, variable: Variable) -> float:
        """The weight decay of a variable: its group's, or else the optimizer's."""
        own = self._group(variable).weight_decay
        return float(self.weight_decay if own is None else own)

    def update(self, graph: Graph, gradients: dict[Variable, Gradient]) -> None:
        """Assign the next value of every variable, and of what is kept beside it."""
        self._check_groups(list(gradients))
        before = len(graph.nodes)
        scalars = Scalars(graph, self.lr)
        ones = [
            One(graph, variable, gradient, scalars, self._group(variable), self)
            for variable, gradient in gradients.items()
        ]
        with graph.scope("update", graph.outputs["loss"].where):
            if self.clip or self.norms:
                ones = [one.with_one_reader() for one in ones]
            if self.clip:
                norm = scalars.clip(self.clip, [one.squares(one.values) for one in ones])
                graph.outputs.setdefault(GRADIENT_NORM, norm)
            for one in ones:
                self._update(one)
        graph.updates.update(graph.nodes[before:])

    def _group(self, variable: Variable) -> Group:
        return next((group for group in self.groups if group.has(variable)), Group("*"))

    def _check_groups(self, variables: list[Variable]) -> None:
        for group in self.groups:
            if not any(group.has(variable) for variable in variables):
                names = ", ".join(v.name for v in variables)
                raise JobError(f"{group} matches no trainable variable; there are {names}")

    def _update(self, one: One) -> None:
        """Add the nodes for one variable."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class One:
    """One variable's update in the making."""

    graph: Graph
    variable: Variable
    gradient: Gradient
    scalars: Scalars
    group: Group
    optimizer: Optimizer

    @property
    def weight(self) -> Tensor:
        return self.variable.tensor

    @property
    def values(self) -> Tensor:
        """What of the gradient is not zero."""
        return self.gradient.values if isinstance(self.gradient, Rows) else self.gradient

    @property
    def weight_decay(self) -> float:
        """The group's, or else the optimizer's."""
        return self.optimizer.decay_of(self.variable)

    def with_one_reader(self) -> One:
        """With a copy of the gradient, so that what is partial is reduced once for all readers."""
        if isinstance(self.gradient, Rows):
            return self  # which is a sum already
        return replace(self, gradient=self.node(Identity(), self.gradient)[0])

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes that every update op has."""
        return {"clipped": self.scalars.factor is not None, "ema": float(self.optimizer.ema)}

    def rate(self) -> Tensor:
        """The learning rate in the weight's dtype."""
        return self.scalars.rate(self.group.lr_scale, self.weight.dtype)

    def adapted_rate(self, squares: Tensor, trust: float = 1.0, decay: float = 0.0) -> Tensor:
        """The rate by the norms of the weight and of what `squares` is the sum for."""
        rate = self.scalars.rate(self.group.lr_scale, "float64")
        ratio = TrustRatio(trust, decay, self.weight.dtype)
        return self.node(ratio, rate, self.squares(self.weight), squares)[0]

    def correction(self, beta: float) -> Tensor:
        """1 / (1 - beta^steps) in the weight's dtype."""
        return self.scalars.correction(beta, self.weight.dtype)

    def factor(self) -> tuple[Tensor, ...]:
        """What the gradient is to be multiplied with, if anything: the last scalar of an update."""
        factor = self.scalars.factor
        return () if factor is None else (self.scalars.cast(factor, self.weight.dtype),)

    def squares(self, x: Tensor) -> Tensor:
        """The sum of the squares of x."""
        with self._scope():
            return self.scalars.squares(x)

    def gradient_squares(self) -> Tensor:
        """The sum of the squares of the gradient, after clipping."""
        squares, factor = self.squares(self.values), self.scalars.factor
        return squares if factor is None else squares * factor * factor

    def node(self, op: Op, *inputs: Tensor) -> tuple[Tensor, ...]:
        """A node that bears the variable's name."""
        with self._scope():
            return self.graph.add(op, *inputs)

    def keep(self, name: str, init: Op | None = None) -> Tensor:
        """A variable like the weight, NAME.name, that begins with 0 or as `init` gives."""
        weight, like = self.weight, self.variable
        zero = Fill(weight.shape, 0.0, weight.dtype)
        with self._scope():
            return self.graph.variable(
                f"{like.name}.{name}", weight.shape, dtype=weight.dtype, init=init or zero,
                trainable=False, sbp=like.hint,
            )  # fmt: skip

    def add(self, op: Update, scalars: tuple[Tensor, ...], *kept: Tensor) -> None:
        """The update op: what it gives is assigned to the weight, what is kept, the average."""
        if self.optimizer.ema:
            kept = (*kept, self.keep(AVERAGE, self.variable.init))
        ids: tuple[Tensor, ...] = ()
        if isinstance(self.gradient, Rows):
            op, ids = by_rows(op, self.gradient.block), (self.gradient.ids,)
        inputs = (self.weight, self.values, *ids, *scalars, *self.factor(), *kept)
        for old, new in zip((self.weight, *kept), self.node(op, *inputs), strict=True):
            self.graph.assign(old, new)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with self.graph.scope(self.variable.name, self.weight.where):
            yield
