"""The records that make up a plan. Plain data: names, numbers and tuples of them.

    Plan ── variables: Variable       what persists over steps
         ├─ data: DataSet             what is read, and in which order
         ├─ settings: Settings        how long, when to save and evaluate
         └─ programs: Program         initialise, train, evaluate, evaluate_tail, save
              ├─ registers: Register  memory between a producing task and its consumers
              ├─ tasks: Task          compute, collective, read, write, copies
              ├─ order                the tasks of each stream, as they fire
              └─ outputs: Output      the scalars that a step gives

Shapes are logical (of the whole job); what one rank holds of them follows from layout, mesh and
rank (`plan.slice`), so a plan does not grow with the number of ranks. Offsets and `nbytes` are
those of the largest shard, which is always the one at coordinate 0 of every axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout
from mpiflow.plan.first import NOTHING, FirstValues
from mpiflow.plan.places import arena_name, arena_names

if TYPE_CHECKING:
    from mpiflow.plan.slice import RankPlan

FORMAT = 1

MOST_FIRINGS = 2**23
"""Of a step in micro-batches: these are proven in minutes, and no step is known to have as many."""

COMPUTE, READ, WRITE = "compute", "read", "write"
SEND, RECEIVE = "send", "receive"
"""Kinds of tasks whose streams are named after these and the other stage: `send.1`."""


def communication_stream(axis: str) -> str:
    """The stream of the communicators along a mesh axis, or several: `data,model`."""
    return f"comm.{axis}"


def host_stream(stream: str) -> str:
    """The stream of what the host has to start itself beside a stream of the device."""
    return f"{stream}.host"


@dataclass(frozen=True, slots=True)
class Register:
    """Memory of one tensor: `slots` buffers of `nbytes` each, side by side from `offset`.

    Firing after firing takes the next slot, over steps; with `rewound`, micro-batch k of every step
    takes slot k modulo `slots`. `aliases` names the register or variable whose memory this one
    shares on purpose. `micro` is the micro-batch that it holds, in a program that `unroll` made.
    `space` is "" for memory of what computes, or "pinned", see `plan.places`. `pool` names rewound
    slots that registers of several segments take as they are free, see `plan.seats`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    offset: int
    nbytes: int
    slots: int = 1
    aliases: str = ""
    micro: int = 0
    rewound: bool = False
    space: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Variable(Register):
    """A register that persists over steps and programs, and is saved in checkpoints.

    One that several pipeline stages keep, each in its own place, has a record for each `stage`.
    """

    trainable: bool = True
    where: str = ""
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """A unit of work on one stream.

    `kind` is compute, collective, read, write, send, receive, h2d or d2h. `op` is the name of the
    op, or the collective: all_reduce, all_gather, reduce_scatter, all_to_all, exchange. A send, and
    a receive with the same `attributes["message"]`, move a tensor to or from another
    `attributes["stage"]`, whose ranks hold it in its `mesh` and `layout` where these are named, see
    `plan.pieces`.
    `inputs` and `outputs` name registers and variables. `axis` is the mesh axis that a collective
    runs along, or several of them, outermost first: `data,model`. `after` names tasks of the same
    program that must be done first though no register says so (a variable is overwritten after its
    last reader). `workspace` is (offset, bytes).
    `nbytes` is the memory that a compute task touches, or the largest payload that a rank sends.
    `where` is the line of the user's program. `seconds` is predicted. Costs are those of one
    firing. `phase` is the part of the step, and `segment` the part of the last loop, see `Program`;
    `micro` is the micro-batch of a firing, in a program that `unroll` made. `route` is how ranks
    reach one another in a plan for accelerators, see `plan.places`. `overhead` is what a message
    takes, in predicted seconds, from the kernels beside it.
    """

    name: str
    kind: str
    stream: str
    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    axis: str = ""
    after: tuple[str, ...] = ()
    workspace: tuple[int, int] = (0, 0)
    flops: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    where: str = ""
    phase: int = 0
    segment: int = 0
    micro: int = 0
    route: str = ""
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """A scalar that a program gives: the mean over rows, or a total, of the whole batch."""

    name: str
    register: str
    total: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """The tasks of one kind of step, with the order in which each stream fires them.

    A step of several `micro_batches` goes through phases: 0, 1, 2 and so on. The tasks of an even
    phase fire once; those of an odd one are a loop, which every stream goes through once for each
    micro-batch. The layouts of its registers have a first part more, for the axis of time; a
    register that is B there but is written in a loop gathers a sum, or rows, over its turns.
    `plan.unroll` writes the loops out.

    With pipeline stages each `stage` has a program of the same name. Its last loop is in segments
    (forward, backward), and `sequence` says which segment is done of which micro-batch, in turn.
    """

    name: str
    rows: int
    registers: tuple[Register, ...]
    tasks: tuple[Task, ...]
    order: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[Output, ...] = ()
    seconds: float = 0.0
    data: str = ""
    micro_batches: int = 1
    stage: int = 0
    sequence: tuple[tuple[int, int], ...] = ()

    def needs(self) -> dict[str, tuple[str, ...]]:
        """By task: the tasks that must be done before it, for its inputs or by its `after`.

        A variable is no register: a task that reads one reads its value of before the step.
        """
        registers = {register.name for register in self.registers}
        made_by = {n: task.name for task in self.tasks for n in task.outputs if n in registers}
        return {
            task.name: tuple(
                dict.fromkeys([*[made_by[n] for n in task.inputs if n in made_by], *task.after])
            )
            for task in self.tasks
        }


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a data set: the shape and dtype of a row."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its path relative to the data folder, its rows, and rows per chunk.

    `digest` is a hash of what the file holds, by which a changed one is found.
    """

    name: str
    rows: int
    chunk_rows: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Files with the same fields, and the order in which their rows are used.

    `lanes` and `window` (in chunks) decide the shuffled order and never depend on the ranks.
    `fingerprint` is one hash over those of the shards, empty where the fields were only declared.
    """

    name: str
    pattern: str
    fields: tuple[Field, ...]
    shards: tuple[Shard, ...]
    rows: int
    batch: int
    shuffle: bool
    seed: int
    lanes: int
    window: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Settings:
    """How long a run is, when it saves, evaluates and stops. Zero and empty mean never.

    `best` is a metric (`evaluate.accuracy`) whose best checkpoint is kept; `mode` is min or max.
    `patience` is how many evaluations without a better one end the run.
    """

    epochs: int
    steps_per_epoch: int
    save_steps: int = 0
    save_epochs: int = 0
    save_minutes: float = 0.0
    keep: int = 2
    evaluate_steps: int = 0
    evaluate_epochs: int = 1
    best: str = ""
    mode: str = "max"
    patience: int = 0


@dataclass(frozen=True, slots=True)
class UserOp:
    """An op of the user's own that tasks name: its name, FILE.Class, and where it was written.

    `file` is relative to the job's folder, or a bare name where it lies elsewhere. `digest` is a
    hash of the source, by which a changed op is found.
    """

    name: str
    file: str
    digest: str


@dataclass(frozen=True, slots=True)
class Layouts:
    """How good the layouts of a training step are, and how many bytes they had to fit into.

    `seconds` are what the compiler adds up for them, without what overlaps; any others that fit
    save the share `gap` of that at most, which is 0 where these are proven to be the best. `limit`
    is 0 where memory was not limited.
    """

    seconds: float = 0.0
    gap: float = 0.0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that any rank has to do. A value: the same job gives the same plan.

    `identity` says what is computed, by section (model, optimizer, data, batch, seed, numerics);
    its hash is the program digest, which no rank count, mesh, machine or device changes.
    `device` is the kind that it is made for, host or accelerator.
    `arenas` gives the bytes of each arena, those of the largest first where there are stages;
    `process_bytes` the predicted memory of the process.
    `notes` are remarks for the user. `ops` are those of the user's own, whose code is not here.
    `first` is what fills variables when a new run begins. `overlap` is whether collectives are
    taken to progress while ranks compute; it changes predictions only. `layouts` says how good
    those of the training step are.
    """

    job: str
    version: str
    numpy: str
    mesh: Mesh
    device: str
    machine: str
    numerics: str
    seed: int
    identity: tuple[tuple[str, str], ...]
    variables: tuple[Variable, ...]
    arenas: tuple[tuple[str, int], ...]
    process_bytes: int
    data: tuple[DataSet, ...]
    settings: Settings
    programs: tuple[Program, ...]
    notes: tuple[str, ...] = ()
    ops: tuple[UserOp, ...] = ()
    first: FirstValues = NOTHING
    overlap: bool = True
    layouts: Layouts = Layouts()
    format: int = FORMAT

    def at_stage(self, stage: int) -> Plan:
        """What the ranks of one pipeline stage do, as a plan for them alone."""
        if self.mesh.stages == 1:
            return self
        return replace(
            self,
            mesh=self.mesh.within_stage(stage),
            variables=tuple(v for v in self.variables if v.stage == stage),
            arenas=tuple(
                (name, dict(self.arenas)[f"{name}.{stage}"]) for name in arena_names(self.device)
            ),
            programs=tuple(p for p in self.programs if p.stage == stage),
        )

    def arena(self, space: str = "") -> int:
        """The bytes of the arena of a space, those of the largest stage."""
        return dict(self.arenas)[arena_name(self.device, space)]

    def stages(self) -> tuple[Plan, ...]:
        """The plans of all stages; this one alone where there are none."""
        return tuple(self.at_stage(stage) for stage in range(self.mesh.stages))

    def distinct_variables(self) -> tuple[Variable, ...]:
        """The variables, of which each counts once, whatever stages keep it."""
        return tuple({v.name: v for v in reversed(self.variables)}.values())[::-1]

    def program(self, name: str) -> Program | None:
        """The program of that name, if the job has one."""
        return next((p for p in self.programs if p.name == name), None)

    def dataset(self, name: str) -> DataSet:
        """The data set of that name."""
        return next(d for d in self.data if d.name == name)

    def mesh_of(self, program: Program) -> Mesh:
        """The mesh of a program's layouts: that of a stage, with the axis of time if it has one."""
        return self.mesh.within_stage(program.stage).in_time(program.micro_batches)

    def communicators(self) -> tuple[str, ...]:
        """What collectives run along: every axis, and the sets of several that tasks name."""
        tasks = (task for program in self.programs for task in program.tasks)
        named = (task.axis for task in tasks if task.kind == "collective")
        return tuple(dict.fromkeys((*self.mesh.within_stage().names, *named)))

    def slice(self, rank: int, program: Program | None = None) -> RankPlan:
        """The plan seen from one rank: its variables, or the tensors of a program."""
        from mpiflow.plan.slice import RankPlan

        mesh = self.mesh_of(program) if program else self.mesh
        return RankPlan(mesh, rank, mesh.coordinates(rank))

    def tensors(self, program: Program) -> dict[str, Register]:
        """Variables and the registers of a program, by name; names are unique over both."""
        alone = self.mesh.stages == 1
        kept = (v for v in self.variables if alone or v.stage == program.stage)
        variables = in_time(kept, self.mesh_of(program))
        return {r.name: r for r in (*variables, *program.registers)}


def in_time(variables: Iterable[Variable], mesh: Mesh) -> tuple[Variable, ...]:
    """Variables with layouts on a mesh that may be timed; all micro-batches share them."""
    if not mesh.timed:
        return tuple(variables)
    return tuple(replace(v, layout=(B, *v.layout)) for v in variables)
