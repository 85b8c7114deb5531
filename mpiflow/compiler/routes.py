"""How accelerators reach one another: which route a plan has, and what it costs where it is none.

nccl     from one device to another, started on the device
mpi      an MPI that takes memory of devices, which every run has to prove again
staged   copied to pinned memory, sent from there by any MPI, copied back
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod

from mpiflow.compiler.machine import Machine
from mpiflow.errors import UsageError
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.places import ACCELERATOR, D2H, H2D, HOST, NCCL, ROUTES, STAGED
from mpiflow.plan.records import RECEIVE, SEND, Program, Register, Task
from mpiflow.plan.rows import FETCH, ROW_KINDS
from mpiflow.plan.slice import RankPlan, parts_of

_STRIDED = {
    SEND: "messages to stages of other ranks, of parts that are no run of memory: staged",
    RECEIVE: "messages from stages of other ranks, of parts that are no run of memory: staged",
}
DEVICES = {"cpu": HOST, "fake": ACCELERATOR, "cuda": ACCELERATOR}
"""What --device names: the kinds that plans are made for."""


def device_kind(device: str) -> str:
    """The kind of a device; UsageError where there is none of that name."""
    if device not in DEVICES:
        raise UsageError(f"--device {device}: there are {', '.join(DEVICES)}")
    return DEVICES[device]


def choose_route(device: str, route: str | None, machine: Machine) -> str:
    """The route that is asked for, or that of the machine; "" between ranks on the host."""
    if device_kind(device) == HOST:
        if route is not None:
            raise UsageError(
                f"--route {route} is between accelerators, and these ranks run on CPUs; give"
                " --device cuda, or fake, with it"
            )
        return ""
    if route is None:
        return machine.route or STAGED if device == "cuda" else STAGED
    if route not in ROUTES:
        raise UsageError(f"--route {route}: there are {', '.join(ROUTES)}")
    return route


def route_notes(programs: Iterable[Program], whole: Mesh, route: str) -> Iterator[str]:
    """What is not done as the plan's route would have it, and its price in a training step."""
    groups: dict[str, list[float]] = defaultdict(list)
    for program in programs:
        if program.name != "train":
            continue
        mesh = whole.within_stage(program.stage).in_time(program.micro_batches)
        registers = {r.name: r for r in program.registers}
        for task in program.tasks:
            times = program.micro_batches if task.phase % 2 else 1
            if task.route == NCCL and (what := _grouped(task, registers, mesh)):
                groups[what] += [task.seconds] * times
            elif task.kind in (SEND, RECEIVE) and task.route != route:
                copies = sum(copy.seconds for copy in _beside(task, program))
                sent = task.seconds if task.kind == SEND else 0.0  # which its receive is too
                groups[_STRIDED[task.kind]] += [sent + copies] * times
            elif task.op in ROW_KINDS and task.route == STAGED:
                beside = _beside(task, program)
                seconds = task.seconds + sum(copy.seconds for copy in beside)
                nbytes = sum(copy.nbytes for copy in beside)
                what = "looks up" if task.op == FETCH else "sends"
                yield (
                    f"{task.name} {what} rows whose number is known only in the step: staged on"
                    f" the host, {nbytes:,} bytes are copied, {_text(times * seconds)} a step"
                )
    for what, found in groups.items():
        yield f"{len(found)} {what}, {_text(sum(found))} a step"


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us predicted"


def _beside(task: Task, program: Program) -> list[Task]:
    """The copies that bring what a task takes, and take what it gives."""
    return [
        copy
        for copy in program.tasks
        if (copy.kind == D2H and not set(copy.outputs).isdisjoint(task.inputs))
        or (copy.kind == H2D and not set(copy.inputs).isdisjoint(task.outputs))
    ]


def _grouped(task: Task, registers: dict[str, Register], mesh: Mesh) -> str:
    """What NCCL has no call for, so that it is a group of simpler ones; "" for all others."""
    if task.kind != "collective":
        return ""
    if task.op in ("all_to_all", "exchange"):
        return f"{task.op} along {task.axis}: NCCL has none, a group of sends and receives is"
    if task.op in ("all_gather", "reduce_scatter") and _uneven(task, registers, mesh):
        way = "broadcasts" if task.op == "all_gather" else "reductions"
        return f"uneven {task.op} along {task.axis}: NCCL has none, a group of {way} is"
    return ""


def _uneven(task: Task, registers: dict[str, Register], mesh: Mesh) -> bool:
    """Whether members have parts of different sizes; a part that is a variable is looked up too."""
    parts = [registers[name] for name in parts_of(task) if name in registers]
    rank = RankPlan(mesh, 0, mesh.coordinates(0))
    peers = rank.peers(task.axis)
    return any(len({prod(peer.shape(part)) for peer in peers}) > 1 for part in parts)
