"""The ranks of a job arranged on named axes, outermost (slowest link) first.

A step that is cut into micro-batches has one axis more, in front: time. Its parts are held by the
same ranks one after another, and layouts say of it what they say of any axis: S(0) is one
micro-batch's rows, P its contribution to a sum, B what all micro-batches share.

Pipeline stages may have different numbers of ranks: `stage=2,data=3+1` has three on stage 0 and one
on stage 1. Then the ranks of a stage stand together, one stage after another.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod

from mpiflow.errors import UsageError

MICRO = "micro"
"""The name of the axis that runs in time; no axis of ranks may have it."""
STAGE = "stage"
"""The name of the axis along which the model is cut into pipeline stages."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0..size-1 in row-major order over `axes`, pairs of name and size.

    Where it is `timed`, the first axis is that of the micro-batches. Where pipeline stages differ,
    `by_stage` has the axes that have a size of their own on each, and `axes` the largest of these.
    """

    axes: tuple[tuple[str, int], ...]
    timed: bool = False
    by_stage: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        if self.by_stage:
            return sum(self.within_stage(stage).size for stage in range(self.stages))
        return prod(self.sizes[self.timed :])

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has; 1 where it is not cut."""
        return self.sizes[0] if self.timed else 1

    def in_time(self, micro_batches: int) -> Mesh:
        """The same ranks, for a step of so many micro-batches; the mesh itself if it is one."""
        if micro_batches == 1:
            return self
        return replace(self, axes=((MICRO, micro_batches), *self.axes), timed=True)

    @property
    def stages(self) -> int:
        """How many pipeline stages there are; 1 without an axis of that name."""
        return self.sizes[self.index(STAGE)] if STAGE in self.names else 1

    def within_stage(self, stage: int = 0) -> Mesh:
        """The ranks of one stage, on the other axes; the mesh itself where there are no stages."""
        if STAGE not in self.names:
            return self
        own = {name: sizes[stage] for name, sizes in self.by_stage}
        axes = ((name, own.get(name, size)) for name, size in self.axes if name != STAGE)
        return Mesh(tuple(axes) or (("data", 1),), self.timed)

    def stage_of(self, rank: int) -> tuple[int, int]:
        """The stage of a rank, and which rank it is of those of the stage."""
        if STAGE not in self.names:
            return 0, rank
        if self.by_stage:
            stage = bisect(self._first_ranks(), rank) - 1
            return stage, rank - self._first_ranks()[stage]
        where, axis = list(self.coordinates(rank)), self.index(STAGE)
        stage = where.pop(axis)
        return stage, self.within_stage().rank(tuple(where or (0,)))

    def rank_in_stage(self, stage: int, rank: int) -> int:
        """The rank that is `rank` of those of a stage."""
        if STAGE not in self.names:
            return rank
        if self.by_stage:
            return self._first_ranks()[stage] + rank
        where = list(self.within_stage().coordinates(rank))[: len(self.axes) - 1]
        where.insert(self.index(STAGE), stage)
        return self.rank(tuple(where))

    def _first_ranks(self) -> tuple[int, ...]:
        """The first rank of each stage, where stages differ."""
        return tuple(
            accumulate((self.within_stage(s).size for s in range(self.stages - 1)), initial=0)
        )

    def described(self) -> dict[str, int | list[int]]:
        """The size of each axis, or its sizes by stage, for reports."""
        return {**dict(self.axes), **{name: list(sizes) for name, sizes in self.by_stage}}

    def index(self, axis: str) -> int:
        """The position of an axis; axis 0 is the outermost."""
        return self.names.index(axis)

    def along(self, axis: str) -> tuple[int, ...]:
        """The positions of the axes that a task names, outermost first: `data`, `data,model`."""
        return tuple(map(self.index, axis.split(",")))

    def joined(self, axes: Iterable[int]) -> str:
        """The name of the axes at these positions taken together, as `along` reads it."""
        return ",".join(self.names[axis] for axis in axes)

    def extent(self, axes: Iterable[int]) -> int:
        """How many ranks a group along these axes has."""
        return prod(self.sizes[axis] for axis in axes)

    def coordinates(self, rank: int, micro: int = 0) -> tuple[int, ...]:
        """Where a rank stands on each axis; on that of time, at the micro-batch `micro`."""
        where = []
        for size in reversed(self.sizes[self.timed :]):
            rank, index = divmod(rank, size)
            where.append(index)
        return (*(micro,) * self.timed, *reversed(where))

    def rank(self, coordinates: tuple[int, ...]) -> int:
        """The rank at the given coordinates, whatever the micro-batch."""
        rank = 0
        pairs = zip(self.sizes, coordinates, strict=True)
        for size, index in list(pairs)[self.timed :]:
            rank = rank * size + index
        return rank

    def group(self, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on these axes only, in order: along the last first."""
        where = list(self.coordinates(rank))
        members = []
        for indices in product(*(range(self.sizes[axis]) for axis in axes)):
            for axis, index in zip(axes, indices, strict=True):
                where[axis] = index
            members.append(self.rank(tuple(where)))
        return tuple(members)

    def __str__(self) -> str:
        own = dict(self.by_stage)
        return ",".join(f"{n}={'+'.join(map(str, own.get(n, (size,))))}" for n, size in self.axes)


def parse_mesh(text: str, ranks: int | None = None) -> Mesh:
    """The mesh that `data=2,model=4` names; its size must be `ranks` where that is given.

    In `stage=2,data=3+1` the stages have sizes of their own on an axis.
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        name, sizes = name.strip(), [each.strip() for each in size.split("+")]
        if not name.isidentifier() or not all(s.isdecimal() and int(s) for s in sizes):
            raise UsageError(
                f"mesh {text!r}: {part!r} is not NAME=SIZE; write data=2,model=4, or"
                " stage=2,data=3+1 for stages of 3 and 1 ranks"
            )
        if name == MICRO:
            raise UsageError(f"mesh {text!r}: {MICRO!r} is the axis of micro-batches, not of ranks")
        if name in found:
            raise UsageError(f"mesh {text!r}: axis {name!r} occurs twice")
        found[name] = tuple(map(int, sizes))
    mesh = _mesh(found, text)
    if ranks is not None and mesh.size != ranks:
        raise UsageError(f"mesh {text!r} has {mesh.size} ranks, --ranks says {ranks}")
    return mesh


def _mesh(sizes: dict[str, tuple[int, ...]], text: str) -> Mesh:
    """The mesh of axes with one size each, or one for each stage."""
    stages = sizes.get(STAGE, (1,))
    for name, each in sizes.items():
        if len(each) == 1:
            continue
        if len(stages) > 1 or len(each) != stages[0]:
            raise UsageError(
                f"mesh {text!r}: axis {name!r} has {len(each)} sizes, {'+'.join(map(str, each))},"
                f" one for each stage, and there are {'+'.join(map(str, stages))} stages"
            )
        if next(iter(sizes)) != STAGE:
            raise UsageError(
                f"mesh {text!r}: where stages differ, axis {STAGE!r} comes first: the ranks of a"
                " stage stand together"
            )
    return Mesh(
        tuple((name, max(each)) for name, each in sizes.items()),
        by_stage=tuple((name, each) for name, each in sizes.items() if len(set(each)) > 1),
    )
