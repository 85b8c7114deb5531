"""Verify: a plan that passes completes on every rank, whatever the timing, and reads what it wrote.

    verify             names, then each program
    verify_layout      form: tensors and collectives
    verify_phases      form: loops over micro-batches
    verify_places      form: what lies where, copies, routes
    verify_stages      form: pipeline stages, and the messages between them
    verify_between     form: memory that outlives a step is of one program
    marked, walk       proof: a step comes to its end, whatever the timing; what is before what
    verify_memory      proof: whatever is read is there

Form is what the proof takes for granted: names, layouts, sizes. Each stage is proven as a plan of
its own, then all stages together. Nothing here comes from the compiler: only the plan's records are
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mpiflow.errors import VerifyError
from mpiflow.garbage import no_collection
from mpiflow.graph.sbp import Broadcast, Partial, layout_text
from mpiflow.plan.marked import Step
from mpiflow.plan.places import AHEAD, D2H, FEED, H2D, workspace_space
from mpiflow.plan.records import COMPUTE, READ, RECEIVE, SEND, WRITE, Plan, Program, Register, Task
from mpiflow.plan.verify_between import check_between
from mpiflow.plan.verify_layout import check_collective, check_tensor, label
from mpiflow.plan.verify_memory import check_memory
from mpiflow.plan.verify_phases import check_count, check_phases
from mpiflow.plan.verify_places import arenas_by_space, check_places, check_routes
from mpiflow.plan.verify_stages import check_parts, check_together

_STREAMS = {
    "compute": (COMPUTE,),
    "read": (READ,),
    "write": (WRITE,),
    H2D: (H2D, FEED),
    D2H: (D2H,),
}
_OTHERS = ("collective", SEND, RECEIVE)
"""Kinds of tasks that have a stream for each communicator, or each lane to another stage."""
_CHANGING = ("initialise", "train")


@no_collection()
def verify(plan: Plan) -> None:
    """Prove the plan; VerifyError with the smallest counter-example where that fails."""
    check_routes(plan)
    if plan.mesh.stages > 1:
        check_parts(plan)
        for stage in plan.stages():
            verify(stage)
        check_together(plan)
        return
    arenas = arenas_by_space(plan)
    _unique("the plan", "data set", (data.name for data in plan.data))
    _unique("the plan", "program", (program.name for program in plan.programs))
    _unique("the plan", "variable", (variable.name for variable in plan.variables))
    for variable in plan.variables:
        check_tensor(variable, plan.mesh, arenas, "the plan")
        if variable.slots != 1 or variable.aliases:
            raise VerifyError(
                f"variable {variable.name} has {variable.slots} slots and aliases "
                f"{variable.aliases or 'nothing'}; it must have one slot of its own"
            )
        if any(isinstance(sbp, Partial) for sbp in variable.layout):
            raise VerifyError(
                f"variable {variable.name} has layout {layout_text(variable.layout)!r}: partial "
                "values cannot be kept over steps"
            )
    for program in plan.programs:
        _check_program(plan, program, arenas)
    check_between(plan)
    if plan.variables and plan.program("initialise") is None:
        raise VerifyError("the plan has variables and no program 'initialise' that writes them")


def _check_program(plan: Plan, program: Program, arenas: dict[str, int]) -> None:
    context = f"program {program.name}"
    check_count(program, context)
    _check_references(plan, program, context)
    _check_streams(program, context)
    _check_producers(program, context)
    mesh = plan.mesh_of(program)
    for register in program.registers:
        check_tensor(register, mesh, arenas, context)
    tensors = plan.tensors(program)
    for task in program.tasks:
        if task.kind == "collective":
            check_collective(task, tensors, mesh, context)
        _check_workspace(task, arenas[workspace_space(task.route)], context)
    check_places(plan, program, context)
    check_phases(program, context)
    _check_aliases(program, tensors)
    check_memory(plan.variables, Step(program))
    _check_reading(plan, program, context)
    _check_outputs(program, context)
    _check_role(plan, program, context)


def _unique(context: str, what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1 or not name:
            raise VerifyError(f"{context} has {count} {what}s named {name!r}; names are unique")


def _check_references(plan: Plan, program: Program, context: str) -> None:
    """Names are unique, and everything that is named exists."""
    registers = [register.name for register in program.registers]
    _unique(context, "register", registers)
    _unique(context, "task", (task.name for task in program.tasks))
    _unique(context, "output", (output.name for output in program.outputs))
    variables = {variable.name for variable in plan.variables}
    if both := variables & set(registers):
        raise VerifyError(f"{context}: {min(both)} names a variable and a register")
    known = variables | set(registers)
    tasks = {task.name for task in program.tasks}
    for task in program.tasks:
        for name in (*task.inputs, *task.outputs):
            if name not in known:
                raise VerifyError(f"{context}: {label(task)} uses {name!r}, which does not exist")
        for name in task.after:
            if name not in tasks:
                raise VerifyError(f"{context}: {label(task)} is after {name!r}, which is no task")
    for register in program.registers:
        if register.aliases and register.aliases not in known:
            raise VerifyError(
                f"{context}: register {register.name} aliases {register.aliases!r}, "
                "which does not exist"
            )
    for output in program.outputs:
        if output.register not in registers:
            raise VerifyError(
                f"{context}: output {output.name} is register {output.register!r}, "
                "which does not exist"
            )


def _check_streams(program: Program, context: str) -> None:
    """Every task is listed once, in the order of its own stream."""
    _unique(context, "order", (stream for stream, _ in program.order))
    listed: Counter[int] = Counter()
    for stream, indices in program.order:
        for index in indices:
            if not 0 <= index < len(program.tasks):
                raise VerifyError(
                    f"{context}: stream {stream} lists task {index} of {len(program.tasks)}"
                )
            task = program.tasks[index]
            if task.stream != stream:
                raise VerifyError(
                    f"{context}: {label(task)} belongs to stream {task.stream}, "
                    f"but is listed on stream {stream}"
                )
            listed[index] += 1
    for index, task in enumerate(program.tasks):
        if listed[index] != 1:
            raise VerifyError(
                f"{context}: {label(task)} fires {listed[index]} times in the order of stream "
                f"{task.stream}; it must fire once"
            )
        if task.kind not in (*_STREAMS, *_OTHERS):
            raise VerifyError(f"{context}: {label(task)} is of unknown kind {task.kind!r}")
        if task.kind in _STREAMS and task.stream not in _STREAMS[task.kind]:
            raise VerifyError(
                f"{context}: {label(task)} of kind {task.kind} is on stream {task.stream}"
            )


def _check_producers(program: Program, context: str) -> None:
    """Each register has one producer, and no task works for nothing."""
    producers: dict[str, Task] = {}
    registers = {register.name for register in program.registers}
    for task in program.tasks:
        for name, count in Counter(task.outputs).items():
            if name in registers and (name in producers or count > 1):
                first = label(producers.get(name, task))
                raise VerifyError(
                    f"{context}: register {name} is produced by {first} and again by "
                    f"{label(task)}; one task may produce it"
                )
            if name in registers:
                producers[name] = task
    readers: dict[str, list[str]] = {name: [] for name in registers}
    for task in program.tasks:
        for name in task.inputs:
            if name in registers:
                readers[name].append(label(task))
    for name in (register.name for register in program.registers):
        if name not in producers:
            wanted = f"; {readers[name][0]} would wait for it for ever" if readers[name] else ""
            raise VerifyError(f"{context}: no task produces register {name}{wanted}")
    used = {name for name in registers if readers[name]}
    used |= {output.register for output in program.outputs}
    used |= {r.name for r in program.registers if r.aliases and r.aliases not in registers}
    for task in program.tasks:
        if task.kind not in ("write", SEND) and all(
            n in registers and n not in used for n in task.outputs
        ):
            gives = ", ".join(task.outputs) or "nothing"
            raise VerifyError(f"{context}: {label(task)} gives {gives}, which no task reads")


def _check_aliases(program: Program, tensors: dict[str, Register]) -> None:
    """A register lies exactly over what it aliases, which its producer reads, or copies over."""
    makers = {name: task for task in program.tasks for name in task.outputs}
    registers = {register.name: register for register in program.registers}
    for register in program.registers:
        if not register.aliases:
            continue
        target, task = tensors[register.aliases], makers[register.name]
        what = f"program {program.name}: register {register.name} of {label(task)}"
        if target.name not in task.inputs and task.kind != H2D:
            raise VerifyError(f"{what} aliases {target.name}, which {label(task)} does not read")
        place, wanted = ((r.offset, r.nbytes, r.slots, r.rewound) for r in (register, target))
        if place != wanted or register.space != target.space:
            raise VerifyError(
                f"{what} aliases {target.name}, but lies at {_place(register)} and "
                f"{target.name} at {_place(target)}"
            )
        chain = [register.name]
        while (following := registers[chain[-1]].aliases) in registers:
            if following in chain:
                raise VerifyError(f"{what} aliases {target.name}, which aliases it in turn")
            chain.append(following)


def _place(r: Register) -> str:
    where = f" of {r.space} memory" if r.space else ""
    return f"bytes {r.offset}..{r.offset + r.slots * r.nbytes}{where} ({r.slots} x {r.nbytes})"


def _check_workspace(task: Task, arena: int, context: str) -> None:
    start, nbytes = task.workspace
    if start < 0 or nbytes < 0 or start + nbytes > arena:
        raise VerifyError(
            f"{context}: the workspace of {label(task)} is bytes {start}..{start + nbytes}, "
            f"the arena has {arena} bytes"
        )


def _check_reading(plan: Plan, program: Program, context: str) -> None:
    """Reads have data to read, and something in the step holds back how far ahead they run."""
    if program.data and program.data not in {data.name for data in plan.data}:
        raise VerifyError(f"{context} reads data set {program.data!r}, which does not exist")
    held = {name for task in program.tasks if task.stream not in AHEAD for name in task.inputs}
    fed = {name for task in program.tasks if task.stream == FEED for name in task.inputs}
    for task in program.tasks:
        if task.stream not in AHEAD:
            continue
        if not program.data:
            raise VerifyError(f"{context}: {label(task)} reads, but the program has no data set")
        if task.stream == READ and task.inputs:
            raise VerifyError(
                f"{context}: {label(task)} takes {', '.join(task.inputs)}; a read runs ahead of "
                "the step and takes nothing from it"
            )
        if not (held | fed if task.stream == READ else held) & set(task.outputs):
            raise VerifyError(
                f"{context}: missing slot: no task of the step reads what {label(task)} gives, "
                "so nothing limits how far ahead it runs"
            )


def _check_outputs(program: Program, context: str) -> None:
    """What a step gives is a scalar that every rank holds."""
    registers = {register.name: register for register in program.registers}
    producers = {name: task for task in program.tasks for name in task.outputs}
    for output in program.outputs:
        register = registers[output.register]
        what = f"{context}: output {output.name} ({label(producers[register.name])})"
        if register.shape:
            raise VerifyError(f"{what} has shape {register.shape}; an output is a scalar")
        if any(not isinstance(sbp, Broadcast) for sbp in register.layout):
            raise VerifyError(
                f"{what} has layout {layout_text(register.layout)!r}; every rank needs it, so it "
                "is B on all axes"
            )


def _check_role(plan: Plan, program: Program, context: str) -> None:
    """initialise writes every variable and reads none; only it and train write any."""
    variables = {variable.name: variable for variable in plan.variables}
    overlays = {r.name: r.aliases for r in program.registers if r.aliases in variables}
    written = {overlays.get(n, n): t for t in program.tasks for n in t.outputs}
    for name in variables:
        if program.name == "initialise" and name not in written:
            raise VerifyError(f"{context}: no task writes variable {name}")
        if program.name not in _CHANGING and name in written:
            raise VerifyError(
                f"{context}: {label(written[name])} writes variable {name}; only "
                f"{' and '.join(_CHANGING)} may"
            )
    if program.name == "initialise":
        for task in program.tasks:
            if unset := variables.keys() & task.inputs:
                raise VerifyError(
                    f"{context}: {label(task)} reads variable {min(unset)}, which has no value yet"
                )
