"""The ranks of a job arranged on named axes, outermost (slowest link) first.

A step that is cut into micro-batches has one axis more, in front: time. Its parts are held by the
same ranks one after another, and layouts say of it what they say of any axis: S(0) is one
micro-batch's rows, P its contribution to a sum, B what all micro-batches share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

from mpiflow.errors import UsageError

MICRO = "micro"
"""The name of the axis that runs in time; no axis of ranks may have it."""
STAGE = "stage"
"""The name of the axis along which the model is cut into pipeline stages."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0..size-1 in row-major order over `axes`, pairs of name and size.

    Where it is `timed`, the first axis is that of the micro-batches.
    """

    axes: tuple[tuple[str, int], ...]
    timed: bool = False

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
        return prod(self.sizes[self.timed :])

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has; 1 where it is not cut."""
        return self.sizes[0] if self.timed else 1

    def in_time(self, micro_batches: int) -> Mesh:
        """The same ranks, for a step of so many micro-batches; the mesh itself if it is one."""
        if micro_batches == 1:
            return self
        return Mesh(((MICRO, micro_batches), *self.axes), timed=True)

    @property
    def stages(self) -> int:
        """How many pipeline stages there are; 1 without an axis of that name."""
        return self.sizes[self.index(STAGE)] if STAGE in self.names else 1

    def within_stage(self) -> Mesh:
        """The ranks of one stage, on the other axes; the mesh itself where there are no stages."""
        if STAGE not in self.names:
            return self
        axes = tuple(axis for axis in self.axes if axis[0] != STAGE)
        return Mesh(axes or (("data", 1),), self.timed)

    def stage_of(self, rank: int) -> tuple[int, int]:
        """The stage of a rank, and which rank it is of those of the stage."""
        if STAGE not in self.names:
            return 0, rank
        where, axis = list(self.coordinates(rank)), self.index(STAGE)
        stage = where.pop(axis)
        return stage, self.within_stage().rank(tuple(where or (0,)))

    def rank_in_stage(self, stage: int, rank: int) -> int:
        """The rank that is `rank` of those of a stage."""
        if STAGE not in self.names:
            return rank
        where = list(self.within_stage().coordinates(rank))[: len(self.axes) - 1]
        where.insert(self.index(STAGE), stage)
        return self.rank(tuple(where))

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
        return ",".join(f"{name}={size}" for name, size in self.axes)


def parse_mesh(text: str, ranks: int | None = None) -> Mesh:
    """The mesh that `data=2,model=4` names; its size must be `ranks` where that is given."""
    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        name = name.strip()
        if not name.isidentifier() or not size.strip().isdecimal() or int(size) < 1:
            raise UsageError(f"mesh {text!r}: {part!r} is not NAME=SIZE; write data=2,model=4")
        if name == MICRO:
            raise UsageError(f"mesh {text!r}: {MICRO!r} is the axis of micro-batches, not of ranks")
        if name in dict(axes):
            raise UsageError(f"mesh {text!r}: axis {name!r} occurs twice")
        axes.append((name, int(size)))
    mesh = Mesh(tuple(axes))
    if ranks is not None and mesh.size != ranks:
        raise UsageError(f"mesh {text!r} has {mesh.size} ranks, --ranks says {ranks}")
    return mesh
