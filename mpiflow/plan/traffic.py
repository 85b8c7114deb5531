"""What a step sends, worked out from the plan alone, in time that does not grow with the ranks.

Along an axis the shards change only where the longer spans end; one rank from each stretch
between such places stands for all of them.
"""

from __future__ import annotations

from itertools import product
from math import prod

from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import S
from mpiflow.plan.records import Plan, Program, Register, Task
from mpiflow.plan.slice import RankPlan, common, itemsize, reduced_elements
from mpiflow.plan.volume import sent_elements


def bytes_sent(plan: Plan, program: Program) -> int:
    """Payload bytes that one step sends, of the rank that sends most."""
    return sum(nbytes for _, nbytes in sent_each(plan, program))


def sent_each(plan: Plan, program: Program) -> list[tuple[Task, int]]:
    """The collectives, with what each sends in a step on the rank that sends most of all."""
    firings = [
        (task, program.micro_batches if task.phase % 2 else 1)
        for task in program.tasks if task.kind == "collective"
    ]  # fmt: skip
    return _most_sent(firings, plan.tensors(program), plan.mesh_of(program))


def firing_bytes(task: Task, tensors: dict[str, Register], mesh: Mesh) -> int:
    """Payload bytes that one firing of a collective sends, of the rank that sends most."""
    return _most_sent([(task, 1)], tensors, mesh)[0][1]


def _most_sent(
    firings: list[tuple[Task, int]], tensors: dict[str, Register], mesh: Mesh
) -> list[tuple[Task, int]]:
    """Of collectives that fire so many times each, the bytes of the rank that sends most."""
    tasks = [task for task, _ in firings]
    used = {name: tensors[name] for task in tasks for name in (*task.inputs, *task.outputs)}
    places = _places(mesh, list(used.values()), tasks, used)
    sent = (
        [
            (task, times * sent_by(RankPlan(mesh, mesh.rank(where), where), task, used))
            for task, times in firings
        ]
        for where in product(*places)
    )
    return max(sent, key=lambda each: sum(nbytes for _, nbytes in each))


def sent_by(rank: RankPlan, task: Task, tensors: dict[str, Register]) -> int:
    """Payload bytes that a rank sends in a collective; as `RankPlan.sent_bytes`, without peers."""
    source, target = tensors[task.inputs[0]], tensors[task.outputs[0]]
    size, index = 1, 0
    for axis in rank.mesh.along(task.axis):
        parts = rank.mesh.sizes[axis]
        size, index = size * parts, index * parts + rank.coordinates[axis]
    own = rank.shape(source)
    match task.op:
        case "all_reduce":
            count = reduced_elements([tensors[name] for name in task.inputs], rank)
            elements = sent_elements("all_reduce", (count,), size, index)
        case "all_gather":
            elements = (size - 1) * prod(own)
        case _:  # all but what stays here
            elements = prod(own) - common(rank.box(source), rank.box(target))
    return elements * itemsize(source.dtype)


def _splits_one_dim(task: Task, tensors: dict[str, Register]) -> bool:
    """Whether a collective goes from one split of a dim to another of the same dim."""
    layouts = [tensors[name].layout for name in (task.inputs[0], task.outputs[0])]
    pairs = zip(*layouts, strict=True)
    return any(a != b and isinstance(a, S) and isinstance(b, S) and a.dim == b.dim
               for a, b in pairs)  # fmt: skip


def _places(
    mesh: Mesh, used: list[Register], tasks: list[Task], tensors: dict[str, Register]
) -> list[list[int]]:
    """Coordinates on each axis that stand for all others; micro-batches are all alike."""
    places = [{0} for _ in mesh.axes]
    for register in used:
        lengths = [{size} for size in register.shape]
        for axis, sbp in enumerate(register.layout):
            if isinstance(sbp, S):
                parts, shorter = mesh.sizes[axis], set()
                for length in lengths[sbp.dim]:
                    base, extra = divmod(length // sbp.unit, parts)
                    places[axis].add(extra)
                    shorter |= {base * sbp.unit, (base + (extra > 0)) * sbp.unit}
                lengths[sbp.dim] = shorter
    for task in tasks:
        if _splits_one_dim(task, tensors):
            # Between units of one dim, what stays differs from rank to rank.
            for axis in mesh.along(task.axis):
                places[axis].update(range(mesh.sizes[axis]))
        if task.op == "all_reduce":  # whose segments are spans of the shard's elements
            axes = mesh.along(task.axis)
            members = [tensors[name] for name in task.inputs]
            for where in product(*map(sorted, places)):
                rank = RankPlan(mesh, mesh.rank(where), where)
                longer = reduced_elements(members, rank) % mesh.extent(axes)
                for axis in reversed(axes):
                    longer, index = divmod(longer, mesh.sizes[axis])
                    places[axis].add(index)
    return [[0] if mesh.timed and not axis else sorted(each) for axis, each in enumerate(places)]
