"""Verify: every task finds what it works on in memory that it can reach.

    compute          memory of the device
    read, write      pinned memory, which the host reaches
    h2d, d2h         from pinned memory to the device, and back: the same tensor
    collectives,     pinned memory where they are staged, else that of the device
    send, receive

In a plan for the host there is one memory, and so no copies and no routes. That a copy comes after
what makes its input, and before what takes its memory for something else, is proven like that of
any other task.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpiflow.errors import VerifyError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import layout_text
from mpiflow.plan.exchange import summed_bytes
from mpiflow.plan.pieces import is_strided
from mpiflow.plan.places import (
    ACCELERATOR,
    CUDA_MPI,
    D2H,
    FEED,
    H2D,
    HOST,
    NCCL,
    PINNED,
    ROUTES,
    STAGED,
    arena_names,
)
from mpiflow.plan.records import READ, RECEIVE, SEND, WRITE, Plan, Program, Register, Task
from mpiflow.plan.rows import ROW_KINDS
from mpiflow.plan.verify_layout import label

_COPIES = (H2D, D2H)
_BETWEEN_RANKS = ("collective", SEND, RECEIVE)


def arenas_by_space(plan: Plan) -> dict[str, int]:
    """The bytes of each space of a plan without stages; VerifyError where one has none."""
    if plan.device not in (HOST, ACCELERATOR):
        raise VerifyError(
            f"the plan is for device {plan.device!r}; there are {HOST!r} and {ACCELERATOR!r}"
        )
    sizes = dict(plan.arenas)
    for name in arena_names(plan.device):
        if name not in sizes:
            raise VerifyError(f"the plan has no arena {name!r}, where its memory lies")
    return {"" if name == plan.device else name: sizes[name] for name in arena_names(plan.device)}


def check_places(plan: Plan, program: Program, context: str) -> None:
    """VerifyError where a task works on memory that it cannot reach, or a copy changes a tensor."""
    for variable in plan.variables:
        if variable.space:
            raise VerifyError(f"variable {variable.name} lies in {variable.space} memory; kernels"
                              " use it, so it is in theirs")  # fmt: skip
    if plan.device == HOST:
        _check_host(program, context)
        return
    tensors = plan.tensors(program)
    makers = {name: task for task in program.tasks for name in task.outputs}
    for task in program.tasks:
        what = f"{context}: {label(task)}"
        if task.kind in _COPIES:
            _check_copy(task, tensors, makers, what)
        _check_route(task, what)
        if task.kind in (SEND, RECEIVE) and task.route != STAGED:
            _check_runs(task, tensors, plan.mesh_of(program), what)
        if task.route == CUDA_MPI:
            _check_received(task, summed_bytes(task, tensors, plan.mesh_of(program)), what)
        source, target = _spaces(task)
        _check_spaces(task.inputs, source, "takes", tensors, what)
        _check_spaces(task.outputs, target, "gives", tensors, what)
    _check_streams(program, context)
    _check_spaces(
        (o.register for o in program.outputs), PINNED, "gives", tensors, f"{context}: the step"
    )


def check_routes(plan: Plan) -> None:
    """VerifyError where NCCL and MPI both use devices: side by side they can wait for ever."""
    by_route = {
        task.route: (program, task)
        for program in plan.programs for task in program.tasks if task.route
    }  # fmt: skip
    if {NCCL, CUDA_MPI} <= by_route.keys():
        (a, first), (b, second) = by_route[NCCL], by_route[CUDA_MPI]
        raise VerifyError(
            f"program {a.name}: {label(first)} goes by NCCL and program {b.name}: {label(second)}"
            " by MPI between devices; between the same devices the two can wait for each other"
        )


def _check_host(program: Program, context: str) -> None:
    for task in program.tasks:
        if task.kind in _COPIES or task.route:
            what = f"has route {task.route!r}" if task.route else "copies between memories"
            raise VerifyError(f"{context}: {label(task)} {what}, but a plan for the host has one")


def _check_copy(
    task: Task, tensors: dict[str, Register], makers: dict[str, Task], what: str
) -> None:
    """Each input goes to its output as it is; what runs ahead takes only what is read."""
    if not task.inputs or len(task.inputs) != len(task.outputs):
        raise VerifyError(
            f"{what} copies {len(task.inputs)} tensors to {len(task.outputs)}; each needs a place"
        )
    if task.workspace[1]:
        raise VerifyError(f"{what} copies, and has a workspace of {task.workspace[1]} bytes")
    for pair in zip(task.inputs, task.outputs, strict=True):
        source, target = (_kind(tensors[name]) for name in pair)
        if source != target:
            raise VerifyError(
                f"{what} copies {pair[0]}, {source}, to {pair[1]}, {target}: not the same tensor"
            )
    for name in task.inputs if task.stream == FEED else ():
        if name not in makers or makers[name].stream != READ:
            raise VerifyError(f"{what} runs ahead of the step, but {name} is not read")


def _kind(register: Register) -> str:
    return f"{register.dtype} {register.shape} {layout_text(register.layout)!r}"


def _check_route(task: Task, what: str) -> None:
    if task.kind not in _BETWEEN_RANKS:
        if task.route:
            raise VerifyError(f"{what} has route {task.route!r}, but sends nothing to other ranks")
    elif task.route not in ROUTES:
        raise VerifyError(
            f"{what} has route {task.route!r}; between accelerators it is one of"
            f" {', '.join(ROUTES)}"
        )
    elif task.op in ROW_KINDS and task.route != STAGED:
        raise VerifyError(
            f"{what} has route {task.route}; how many rows travel is known in the step, on the"
            f" host, so its route is {STAGED}"
        )


def _check_runs(task: Task, tensors: dict[str, Register], mesh: Mesh, what: str) -> None:
    """What goes from device to device is a run of memory."""
    register = tensors[(*task.inputs, *task.outputs)[0]]
    if is_strided(task, register, mesh):
        raise VerifyError(
            f"{what} has route {task.route}, and moves parts of {register.name} that do not lie"
            f" side by side; only {STAGED} can"
        )


def _check_streams(program: Program, context: str) -> None:
    """A stream is gone through by the device, or by the host."""
    first: dict[str, Task] = {}
    for task in program.tasks:
        before = first.setdefault(task.stream, task)
        if (task.route == NCCL) != (before.route == NCCL):
            raise VerifyError(
                f"{context}: {label(before)} and {label(task)} are both on stream {task.stream},"
                f" one of route {before.route}, one of {task.route}: devices start what goes by"
                f" {NCCL} themselves, so it has a stream of its own"
            )


def _check_received(task: Task, needed: int, what: str) -> None:
    """What MPI sends to be summed has a place of its own at the end of the workspace."""
    size = task.workspace[1]
    first = task.attributes.get("received", size)
    if needed and not 0 <= first <= size - needed:
        raise VerifyError(
            f"{what} receives {needed:,} bytes to sum from byte {first:,} of its workspace of"
            f" {size:,} bytes"
        )


def _spaces(task: Task) -> tuple[str, str]:
    """The memory that a task takes from, and that it gives to."""
    if task.kind in _COPIES:
        return (PINNED, "") if task.kind == H2D else ("", PINNED)
    on_host = task.route == STAGED or task.stream in (READ, WRITE)
    return (PINNED, PINNED) if on_host else ("", "")


def _check_spaces(
    names: Iterable[str], space: str, verb: str, tensors: dict[str, Register], what: str
) -> None:
    for name in names:
        found = tensors[name].space
        if found != space:
            raise VerifyError(
                f"{what} {verb} {name}, which lies in {found or 'device'} memory; it can only"
                f" reach {space or 'device'} memory"
            )
