"""Seconds: roofline for compute, alpha-beta for communication, latency + bandwidth for input."""

from __future__ import annotations

from math import ceil, log2, prod

from mpiflow.compiler.machine import VECTOR, Link, Machine
from mpiflow.graph.mesh import STAGE, Mesh
from mpiflow.graph.op import REGISTRY, Op
from mpiflow.graph.rule import Shape
from mpiflow.plan.records import RECEIVE, SEND, Task
from mpiflow.plan.slice import itemsize


def compute_bytes(
    op: Op, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtypes: tuple[str, ...]
) -> int:
    """Bytes that a kernel reads and writes; `dtypes` are those of inputs then outputs."""
    shapes = op.touched(inputs, outputs)
    return sum(prod(s) * itemsize(d) for s, d in zip(shapes, dtypes, strict=True))


def compute_seconds(
    machine: Machine, flops: int, nbytes: int, dtype: str, unit: str = VECTOR
) -> float:
    """A kernel: launch, then the slower of arithmetic and memory."""
    return machine.launch + roofline(machine, flops, nbytes, dtype, unit)


def roofline(machine: Machine, flops: int, nbytes: int, dtype: str, unit: str) -> float:
    """The slower of arithmetic and memory (Williams, Waterman, Patterson 2009)."""
    return max(flops / machine.peak(dtype, unit), nbytes / machine.memory)


def op_seconds(
    machine: Machine,
    op: Op,
    inputs: tuple[Shape, ...],
    outputs: tuple[Shape, ...],
    dtypes: tuple[str, ...],
) -> float:
    """A kernel of `op` on local shapes: as measured, where the machine knows the op."""
    kernel = machine.kernels.get(op.name)
    if kernel is None:
        flops, nbytes = op.flops(inputs, outputs), compute_bytes(op, inputs, outputs, dtypes)
        return compute_seconds(machine, flops, nbytes, dtypes[-1], op.unit)
    return kernel.seconds + kernel.factor * ideal_seconds(machine, op, inputs, outputs, dtypes)


def kernel_seconds(machine: Machine, task: Task, dtype: str) -> float:
    """The same by what a plan says of a task."""
    unit, kernel = REGISTRY[task.op].unit, machine.kernels.get(task.op)
    if kernel is None:
        return compute_seconds(machine, task.flops, task.nbytes, dtype, unit)
    return kernel.seconds + kernel.factor * roofline(machine, task.flops, task.nbytes, dtype, unit)


def ideal_seconds(
    machine: Machine,
    op: Op,
    inputs: tuple[Shape, ...],
    outputs: tuple[Shape, ...],
    dtypes: tuple[str, ...],
) -> float:
    """The roofline of the kernel that there is, of which a measured op takes a multiple.

    What it copies besides is counted here and not for ops that were never measured, which may
    have another kernel where they run.
    """
    nbytes = compute_bytes(op, inputs, outputs, dtypes)
    nbytes += op.copied(inputs, outputs) * itemsize(dtypes[-1])
    return roofline(machine, op.flops(inputs, outputs), nbytes, dtypes[-1], op.unit)


def spread(mesh: Mesh, axes: tuple[int, ...], devices_per_node: int) -> tuple[int, int]:
    """How a group along some axes lies: its members on a node (at most), and the nodes it is on.

    Axes next to each other are as one. Apart from these, of the inner ones a group has as many on
    each node, and of the outer ones on as many nodes, as it would along these alone.
    """
    within = nodes = 1
    for run in _runs(axes):
        inside, across = _spread(mesh, run, devices_per_node)
        within, nodes = within * inside, nodes * across
    return within, nodes


def _runs(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Axes in runs of neighbours."""
    runs: list[tuple[int, ...]] = []
    for axis in axes:
        if runs and runs[-1][-1] + 1 == axis:
            runs[-1] = (*runs[-1], axis)
        else:
            runs.append((axis,))
    return runs


def _spread(mesh: Mesh, run: tuple[int, ...], devices_per_node: int) -> tuple[int, int]:
    """As `spread`, along axes that are next to each other.

    Ranks fill one node after another, and axes are ordered outermost first, so a group lies in
    stride x size consecutive ranks. Where these blocks fit the nodes evenly, all groups are alike;
    where one straddles a border, the answer is that of a group which does.
    """
    members = mesh.extent(run)
    stride = prod(mesh.sizes[run[-1] + 1 :])
    block, node = stride * members, devices_per_node or mesh.size
    if node % block == 0 or mesh.size <= node // block * block:
        return members, 1
    within = min(max(1, node // stride), ceil(members / 2))
    return within, ceil(members / within)


def collective_seconds(
    machine: Machine, kind: str, nbytes: int, mesh: Mesh, axes: tuple[int, ...]
) -> float:
    """A collective along some axes, on a tensor of `nbytes` that is joint over its members.

    A group within a node uses the inner link, any other the outer one. Where collectives are
    hierarchical, a group with several members on each of several nodes first reduces (and last
    gathers) within the nodes, so that a rank sends only its part of the tensor over the outer link.
    """
    within, nodes = spread(mesh, axes, machine.devices_per_node)
    members = mesh.extent(axes)
    if nodes == 1:
        return _level(machine, machine.inner, kind, nbytes, members)
    if within == 1 or not machine.hierarchical or kind == "all_to_all":
        return _level(machine, machine.outer, kind, nbytes, members)
    steps = {
        "all_reduce": ("reduce_scatter", "all_reduce", "all_gather"),
        "reduce_scatter": ("reduce_scatter", "reduce_scatter", ""),
        "all_gather": ("", "all_gather", "all_gather"),
    }
    before, across, after = steps[kind]
    inside = sum(_level(machine, machine.inner, x, nbytes, within) for x in (before, after) if x)
    return inside + _level(machine, machine.outer, across, ceil(nbytes / within), nodes)


def packing_seconds(machine: Machine, nbytes: int, mesh: Mesh, axes: tuple[int, ...]) -> float:
    """To pack and unpack several tensors, so many bytes, for a collective along some axes.

    Nothing where ranks see memory of one another: on the CPUs of one host, which plans for a fake
    device are priced as.
    """
    in_memory = machine.host_link is None and spread(mesh, axes, machine.devices_per_node)[1] == 1
    return 0.0 if in_memory else 2 * nbytes / machine.memory


def exchange_seconds(
    machine: Machine, nbytes: int, partners: int, mesh: Mesh, axes: tuple[int, ...]
) -> float:
    """An exchange of slices along some axes, in which no rank sends, or receives, more than this.

    As an all_to_all of a rank and so many partners, of which each member sends (p-1)/p^2.
    """
    if mesh.extent(axes) == 1:
        return 0.0
    members = partners + 1
    link = machine.outer if spread(mesh, axes, machine.devices_per_node)[1] > 1 else machine.inner
    return _level(machine, link, "all_to_all", ceil(nbytes * members**2 / partners), members)


def _level(machine: Machine, link: Link, kind: str, nbytes: int, members: int) -> float:
    """On one link: as measured, from the nearest number of members; else by formula.

    From so many members to others by the ratio of the formula's seconds, which knows how latencies
    and bytes grow with them.
    """
    formula = formula_seconds(machine, link, kind, nbytes, members)
    if members == 1:
        return 0.0
    measured = [m for m in link.measured if m.kind == kind]
    if not measured:
        return formula
    nearest = min(measured, key=lambda m: abs(log2(m.members / members)))
    seconds = nearest.curve.seconds(nbytes)
    if nearest.members == members:
        return seconds
    return seconds * formula / formula_seconds(machine, link, kind, nbytes, nearest.members)


def formula_seconds(machine: Machine, link: Link, kind: str, nbytes: int, members: int) -> float:
    """A collective by alpha-beta, on one link.

    Thakur, Rabenseifner, Gropp 2005: L latencies, L = ceil(log2 p), twice that for all_reduce and
    p - 1 for all_to_all; each byte leaves (p-1)/p of the tensor, twice for all_reduce, and
    (p-1)/p^2 for all_to_all. Reductions add a pass over memory.
    """
    if members == 1:
        return 0.0
    share = (members - 1) / members
    rounds = ceil(log2(members))
    reducing = share * nbytes / machine.memory
    match kind:
        case "all_reduce":
            cost = 2 * rounds * link.latency + 2 * share * nbytes / link.bandwidth + reducing
        case "reduce_scatter":
            cost = rounds * link.latency + share * nbytes / link.bandwidth + reducing
        case "all_gather":
            cost = rounds * link.latency + share * nbytes / link.bandwidth
        case _:
            cost = (members - 1) * link.latency + share * nbytes / members / link.bandwidth
    return link.call + cost


def read_seconds(machine: Machine, nbytes: int) -> float:
    """Reading a rank's rows of a batch."""
    return machine.read_latency + nbytes / machine.storage


def copy_seconds(machine: Machine, nbytes: int) -> float:
    """A copy between the memories of a device and the host; where they are one, within it."""
    if machine.host_link is None:
        return machine.launch + 2 * nbytes / machine.memory
    return machine.host_link.latency + nbytes / machine.host_link.bandwidth


def rounded(seconds: float) -> float:
    """Four digits: prices in a plan must not hang on the last bit of a machine's arithmetic."""
    return float(f"{seconds:.3e}")


def overhead_seconds(machine: Machine, task: Task, mesh: Mesh, inside: Mesh) -> float:
    """What a message, or a collective, takes from the kernels beside it; 0 where none is known.

    A collective is taken to send and to receive its bytes in one message. `mesh` is that of all
    ranks, `inside` that of a stage, which has the axes that collectives run along.
    """
    if task.kind in (SEND, RECEIVE):
        link, ways = _link_between_stages(machine, mesh), 1
    else:
        _, nodes = spread(inside, inside.along(task.axis), machine.devices_per_node)
        link, ways = machine.inner if nodes == 1 else machine.outer, 2
    return ways * link.overhead.seconds(task.nbytes) if link.overhead is not None else 0.0


def message_seconds(machine: Machine, nbytes: int, mesh: Mesh, pieces: int = 1) -> float:
    """What a rank of one pipeline stage sends to ranks of another, in so many pieces."""
    link = _link_between_stages(machine, mesh)
    return pieces * link.call + link.message(nbytes)


def _link_between_stages(machine: Machine, mesh: Mesh) -> Link:
    """What joins ranks of two pipeline stages.

    Where stages have different ranks, those of two are taken to be on two nodes, unless all fit on
    one.
    """
    if mesh.by_stage:
        near = mesh.size <= (machine.devices_per_node or mesh.size)
    else:
        near = spread(mesh, (mesh.index(STAGE),), machine.devices_per_node)[1] == 1
    return machine.inner if near else machine.outer
