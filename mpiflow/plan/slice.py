"""The plan seen from one rank: local shapes, spans and peers, all derived, nothing stored."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mpiflow.graph import sbp
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import Register, Task
from mpiflow.plan.volume import sent_elements


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What `rank` holds and whom it talks to."""

    mesh: Mesh
    rank: int
    coordinates: tuple[int, ...]

    def box(self, register: Register) -> sbp.Box:
        """(start, stop) of each dim of the shard of `register`."""
        where = self.coordinates
        if self.mesh.timed:
            where = (register.micro, *where[1:])
        return sbp.shard_box(register.shape, register.layout, self.mesh.sizes, where)

    def shape(self, register: Register) -> tuple[int, ...]:
        """The shape of the shard."""
        return sbp.box_shape(self.box(register))

    def members(self, axis: str) -> tuple[int, ...]:
        """The ranks of this rank's group along an axis, or several: `data,model`."""
        return self.mesh.group(self.mesh.along(axis), self.rank)

    def peers(self, axis: str) -> list[RankPlan]:
        """The members of this rank's group along `axis`, in order."""
        members = self.members(axis)
        return [RankPlan(self.mesh, rank, self.mesh.coordinates(rank)) for rank in members]

    def counts(self, task: Task, registers: dict[str, Register]) -> tuple[int, ...]:
        """The element counts of a collective, as `volume.sent_elements` wants them."""
        if task.op == "all_reduce":
            return (reduced_elements([registers[name] for name in task.inputs], self),)
        peers = self.peers(task.axis)
        if task.op in ("all_gather", "reduce_scatter"):
            parts = [registers[name] for name in parts_of(task)]
            return tuple(sum(prod(peer.shape(part)) for part in parts) for peer in peers)
        source, target = registers[task.inputs[0]], registers[task.outputs[0]]
        mine = self.box(source)
        return tuple(common(mine, peer.box(target)) for peer in peers)

    def sent_bytes(self, task: Task, registers: dict[str, Register]) -> int:
        """The payload that this rank sends in a collective."""
        members = self.members(task.axis)
        counts, index = self.counts(task, registers), members.index(self.rank)
        elements = sent_elements(task.op, counts, len(members), index)
        return elements * itemsize(registers[task.inputs[0]].dtype)


def parts_of(task: Task) -> tuple[str, ...]:
    """What the members of an all_gather give, or those of a reduce_scatter end up with."""
    return task.inputs if task.op == "all_gather" else task.outputs


def reduced_elements(members: list[Register], rank: RankPlan) -> int:
    """Elements of an all_reduce: the shard itself, or the whole region of a bucket of several."""
    if len(members) == 1:
        return prod(rank.shape(members[0]))
    return sum(register.nbytes for register in members) // itemsize(members[0].dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one element; a bool takes one."""
    return _ITEMSIZE[dtype]


_ITEMSIZE = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


def common(a: sbp.Box, b: sbp.Box) -> int:
    """Elements that two boxes share."""
    return prod(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in zip(a, b, strict=True))
