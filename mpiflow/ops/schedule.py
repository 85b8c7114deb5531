"""Learning-rate schedules: ops from the step count, an int64 scalar, to the rate, a float64 scalar.

They are in the graph, so that a run that goes on has the rates of one that never stopped. Kernels
work on arrays without dims and never read one back, as the step count may be on a device.

Every schedule is lr, or what it decays to, times min(1, (step + 1) / warmup): it begins with lr /
warmup, and reaches lr in the last step of the warm-up. `steps` counts the warm-up too, and is
where the decay ends; 0 stands for the whole run, which `over` fills in.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import isfinite, pi
from typing import Any, Self

from mpiflow.errors import GraphError, JobError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape

_SCALAR: tuple[tuple[str, ...], ...] = ()
LINE = 64
"""Bytes of workspace that hold the few numbers of a scalar op."""


class ScalarOp(Op):
    """Base of ops on arrays without dims, which every rank computes for itself."""

    outputs = 1

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule((_SCALAR,) * len(shapes), (_SCALAR,) * self.outputs)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return LINE


def scratch(shard: ShardView, index: int, dtype: Any = "float64") -> Any:
    """One of the eight numbers that a scalar op's workspace holds, as an array without dims."""
    return shard.work[8 * index : 8 * index + 8].view(dtype)[:1].reshape(())


class StepOp(ScalarOp):
    """Base of scalar ops whose one input is the step count."""

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        if dtypes != ("int64",):
            raise GraphError(f"{self.name} takes the step count, an int64 scalar, not {dtypes[0]}")
        return ("float64",)


class Schedule(StepOp):
    """Base of schedules. Subclasses have `lr`, `warmup`, and write `_decay`."""

    lr: float
    warmup: int

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            number = isinstance(value, int if field.type == "int" else int | float)
            if not number or isinstance(value, bool) or value < 0 or not isfinite(value):
                kind = "whole number" if field.type == "int" else "number"
                raise JobError(
                    f"{self.name}: {field.name} must be a {kind} that is not negative,"
                    f" not {value!r}"
                )

    def over(self, steps: int) -> Self:
        """This schedule for a run of so many steps."""
        return self

    def kernel(self, shard: ShardView, out: Any, step: Any) -> None:
        xp, t = shard.xp, scratch(shard, 0)
        self._decay(xp, step, t, out)
        if self.warmup:
            xp.add(step, 1.0, out=t)
            xp.divide(t, self.warmup, out=t)
            xp.minimum(t, 1.0, out=t)
            xp.multiply(out, t, out=out)

    def _decay(self, xp: Any, step: Any, t: Any, out: Any) -> None:
        """Write the rate to `out`, with `t` for scratch; before the warm-up's end it is lr."""
        raise NotImplementedError


class _ToAnEnd(Schedule):
    """Base of schedules that reach `end` at `steps`, and stay there."""

    steps: int
    end: float

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        if 0 < self.steps <= self.warmup:
            raise JobError(
                f"{self.name}: the decay ends at step {self.steps}, within the warm-up of"
                f" {self.warmup} steps; `steps` counts the warm-up too"
            )

    def over(self, steps: int) -> Self:
        """This schedule, with `steps` if it has none."""
        if not self.steps and steps <= self.warmup:
            raise JobError(
                f"{self.name}: the run has {steps} steps, and the warm-up alone {self.warmup}; take"
                " a shorter warmup=, more epochs or a smaller batch"
            )
        return self if self.steps else replace(self, steps=steps)  # type: ignore[type-var]

    def _left(self, xp: Any, step: Any, out: Any) -> None:
        """The share of the decay that is left: from 1 at the end of the warm-up to 0."""
        xp.subtract(float(self.steps), step, out=out)
        xp.divide(out, self.steps - self.warmup, out=out)
        xp.maximum(out, 0.0, out=out)
        xp.minimum(out, 1.0, out=out)

    def _between(self, xp: Any, out: Any) -> None:
        """From a share of the way between `end` and lr to the rate."""
        xp.multiply(out, self.lr - self.end, out=out)
        xp.add(out, self.end, out=out)


@op
class Constant(Schedule):
    """lr, after the warm-up."""

    lr: float
    warmup: int = 0

    def _decay(self, xp: Any, step: Any, t: Any, out: Any) -> None:
        out.fill(self.lr)


@op
class StepDecay(Schedule):
    """lr factor^k after k times `every` steps, counted from the first step of the run."""

    lr: float
    every: int
    factor: float = 0.1
    warmup: int = 0

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        if not self.every:
            raise JobError("StepDecay: every must be at least 1")

    def _decay(self, xp: Any, step: Any, t: Any, out: Any) -> None:
        xp.floor_divide(step, float(self.every), out=t)
        xp.power(float(self.factor), t, out=out)
        xp.multiply(out, self.lr, out=out)


@op
class Cosine(_ToAnEnd):
    """Half a cosine wave from lr to `end` (Loshchilov, Hutter 2016, without restarts)."""

    lr: float
    steps: int = 0
    end: float = 0.0
    warmup: int = 0

    def _decay(self, xp: Any, step: Any, t: Any, out: Any) -> None:
        self._left(xp, step, t)
        xp.multiply(t, -pi, out=t)
        xp.add(t, pi, out=t)
        xp.cos(t, out=out)
        xp.add(out, 1.0, out=out)
        xp.multiply(out, 0.5, out=out)
        self._between(xp, out)


@op
class LinearDecay(_ToAnEnd):
    """A straight line from lr to `end`."""

    lr: float
    steps: int = 0
    end: float = 0.0
    warmup: int = 0

    def _decay(self, xp: Any, step: Any, t: Any, out: Any) -> None:
        self._left(xp, step, out)
        self._between(xp, out)


@op
class Polynomial(_ToAnEnd):
    """end + (lr - end) left^power, `left` being the share of the steps that is left."""

    lr: float
    steps: int = 0
    power: float = 2.0
    end: float = 0.0
    warmup: int = 0

    def _decay(self, xp: Any, step: Any, t: Any, out: Any) -> None:
        self._left(xp, step, out)
        xp.power(out, self.power, out=out)
        self._between(xp, out)


@op
class InverseSqrt(Schedule):
    """lr sqrt(warmup / (step + 1)) after the warm-up (Vaswani et al. 2017)."""

    lr: float
    warmup: int = 1

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        if not self.warmup:
            raise JobError("InverseSqrt: warmup must be at least 1")

    def _decay(self, xp: Any, step: Any, t: Any, out: Any) -> None:
        xp.add(step, 1.0, out=t)
        xp.maximum(t, float(self.warmup), out=t)
        xp.divide(self.warmup, t, out=t)
        xp.sqrt(t, out=out)
        xp.multiply(out, self.lr, out=out)


@op
class BiasCorrection(StepOp):
    """1 / (1 - beta^(step + 1)): what an average that began at 0 is to be multiplied with."""

    beta: float

    def kernel(self, shard: ShardView, out: Any, step: Any) -> None:
        xp, t = shard.xp, scratch(shard, 0)
        xp.add(step, 1.0, out=t)
        xp.power(self.beta, t, out=out)
        xp.subtract(1.0, out, out=out)
        xp.reciprocal(out, out=out)
