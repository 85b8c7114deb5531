"""The direct exchange of slices: along which axes it runs, and what memory it packs into.

Each rank sends to every member of its group what their target shards have of its own shard. The
group is along the axes on which the source is split and the conversion needs another part: those
that change, and those that split, further inside, a dim which they split. On an axis on which the
source is B everyone stands beside a copy of its own, so no element has to come twice or from afar:
the sender is always the holder who differs from the receiver on the fewest axes.

    (S0, S1) -> (S1, S0)     along both axes
    (S0, S0) -> (B, S0)      along both: the rows of a rank lie on ranks elsewhere on either axis
    (B, S0)  -> (S0, S1)     along the second alone, among ranks of the same rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import Broadcast, Layout, S, Sbp
from mpiflow.plan.records import Register, Task
from mpiflow.plan.slice import itemsize, parts_of


def exchange_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes along which ranks exchange slices; none where each has what it needs."""
    moved: set[int] = set()  # dims that are split otherwise on an axis further outside
    axes = []
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        if before != after:
            moved |= {sbp.dim for sbp in (before, after) if isinstance(sbp, S)}
        if isinstance(before, S) and before.dim in moved:
            axes.append(axis)
    return tuple(axes)


def copies(target: Layout, axes: Iterable[int], mesh: Mesh) -> int:
    """How many members of a group along these axes want an element, at most."""
    return mesh.extent(axis for axis in axes if isinstance(target[axis], Broadcast))


def packing_bytes(task: Task) -> int:
    """How much of its workspace a collective may pack into: all before what it receives to sum."""
    return task.attributes.get("received", task.workspace[1])


def staging_bytes(task: Task, source: Register, target: Register, mesh: Mesh) -> int:
    """What a collective needs to pack what leaves and unpack what comes, on any rank.

    Only pieces along the first dim lie one after another in a shard as they do in a message.
    """
    axes = mesh.along(task.axis)
    first = axes[0]
    match task.op:
        case "all_gather":
            return target.nbytes if _dim(source.layout[first]) else 0
        case "reduce_scatter":
            return source.nbytes if _dim(target.layout[first]) else 0
        case "all_to_all" | "exchange":
            leaving = copies(target.layout, axes, mesh)
            return leaving * source.nbytes + target.nbytes
    return 0


def summed_bytes(task: Task, tensors: Mapping[str, Register], mesh: Mesh) -> int:
    """What a reduction receives before it sums, where messages alone make it; 0 for all others."""
    if task.op not in ("reduce_scatter", "all_reduce"):
        return 0
    others = mesh.extent(mesh.along(task.axis)) - 1
    if task.op == "reduce_scatter":
        return others * sum(tensors[name].nbytes for name in parts_of(task))
    size = itemsize(tensors[task.inputs[0]].dtype)
    elements = sum(tensors[name].nbytes for name in task.inputs) // size
    return others * -(-elements // (others + 1)) * size


def _dim(sbp: Sbp) -> int:
    assert isinstance(sbp, S)
    return sbp.dim
