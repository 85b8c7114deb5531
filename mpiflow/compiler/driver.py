"""Compile: the steps from a job to a plan, in order.

trace        call the model on symbolic inputs               graphs.py, trace.py
check        what no single op can see                       graph/check.py
differentiate  backward pass and updates                     differentiate.py
precision    dtypes; 16-bit casts are made while tracing     precision.py
recompute    which activations stay                          blocks.py, recompute.py, again.py
micro-batches  what fires once for each of them              microbatch.py
signatures   layouts of nodes and variables                  domains.py, signature.py
stages       which pipeline stage does what      stages.py, cuts.py, rooms.py, transfer.py, parts.py
boxing       conversions between layouts, while lowering     boxing.py
lower        tasks and registers                             lower.py
fuse         fewer tasks                                     fuse.py
bucket       fewer collectives and updates, early kernels    bucket.py, updates.py, early.py
copies       between device and host, and routes             copies.py, routes.py
schedule     the order of every stream                       schedule.py
memory       offsets                              memory.py, abreast.py, pack.py, tightfit.py
price        predicted seconds                               here, by plan.simulator
verify       proof                                           plan/verify.py

Evaluations take the same steps on a graph without updates, see evaluation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from mpiflow.compiler.account import reading_bytes
from mpiflow.compiler.advice import does_not_fit
from mpiflow.compiler.again import recompute_notes, rewritten
from mpiflow.compiler.ahead import hurried
from mpiflow.compiler.arrange import (
    Observer,
    Target,
    arrange_stages,
    priced,
    stored,
)
from mpiflow.compiler.assemble import assemble
from mpiflow.compiler.attempts import Levels, Planner, cheapest
from mpiflow.compiler.budget import Share
from mpiflow.compiler.evaluation import Evaluations, averages
from mpiflow.compiler.fit import Attempt, Limit, TooLarge, held_by_share
from mpiflow.compiler.graphs import Graphs
from mpiflow.compiler.lower import lower_initialise, lower_save
from mpiflow.compiler.memory import Packed
from mpiflow.compiler.microbatch import Timing, divide
from mpiflow.compiler.parts import Step, make_step
from mpiflow.compiler.recompute import NONE, Kept, Recompute, all_kept
from mpiflow.compiler.rooms import moved
from mpiflow.compiler.signature import Placed, choose
from mpiflow.compiler.stages import Stages, assign_stages, shares_of
from mpiflow.compiler.zero import level_note
from mpiflow.errors import CompileError
from mpiflow.garbage import no_collection
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.mesh import Mesh
from mpiflow.job import Job
from mpiflow.plan.records import (
    MOST_FIRINGS,
    DataSet,
    Plan,
    Program,
    Variable,
)
from mpiflow.plan.verify import verify

STEPS = (
    "trace", "check", "differentiate", "precision", "recompute", "micro-batches", "signatures",
    "stages", "lower", "fuse", "bucket", "copies", "schedule", "memory", "price", "verify",
)  # fmt: skip
"""What `--after` takes; boxing shows in what `lower` gives."""

_MANY_NODES = 4000
"""From so many on, no offsets are looked for where layouts alone hold too much."""
_COUNTED = 0.88
"""The share of such a model's arena that layouts are counted to hold, at least."""
_MOVES = 3
"""How often nodes are moved between pipeline stages, so that all keep a limit on memory."""

Made = tuple[Step, list[Packed]]
"""A training step with its layouts, and the programs of each pipeline stage with their memory."""


@no_collection()
def compile_job(
    job: Job,
    data: dict[str, DataSet],
    target: Target,
    *,
    folder: Path | None = None,
    cache_bytes: Callable[..., int] = lambda data, *spans: 0,
    observe: Observer = lambda step, program, result: None,
) -> Plan:
    """The plan of a job. `data` holds the record of "train" and of each evaluation.

    Lines of the user's program are named relative to `folder`. `cache_bytes` says what reading
    some spans of each batch keeps in memory.
    """
    return _Compiler(job, data, target, folder or Path.cwd(), cache_bytes, observe).plan()


def training_graph(job: Job, data: dict[str, DataSet], target: Target, folder: Path) -> Graph:
    """What a training step computes, before layouts and stages: the same for any mesh."""
    compiler = _Compiler(
        job, data, target, folder, lambda data, *spans: 0, lambda step, program, result: None
    )
    return compiler.graphs.train()


class _Compiler:
    def __init__(
        self,
        job: Job,
        data: dict[str, DataSet],
        target: Target,
        folder: Path,
        cache_bytes: Callable[..., int],
        observe: Observer,
    ) -> None:
        steps = job.epochs * (data["train"].rows // data["train"].batch)
        self.job = replace(job, optimizer=job.optimizer.over(steps))
        self.data, self.target = data, target
        self.mesh, self.inside, self.machine = target.mesh, target.inside, target.machine
        self.folder, self.cache_bytes, self.observe = folder, cache_bytes, observe
        self.notes: list[str] = []
        self.graphs = Graphs(self.job, data, observe, self.notes)

    def plan(self) -> Plan:
        count = self.job.micro_batches
        graph = self.graphs.train()
        self.target.pipeline.check(self.mesh, count)
        if self.target.zero:
            self.notes.append(level_note(self.target.zero, count))

        @cache
        def recompute() -> Recompute:
            return self._recompute(graph)

        def planner(level: Levels) -> Planner[Made]:
            if level == NONE and not graph.marks:
                return self._planner(graph, all_kept(graph))
            levels = recompute().levels(level) if isinstance(level, str) else level
            kept = recompute().kept(levels)
            return self._planner(rewritten(recompute(), kept), kept)

        try:
            made = cheapest(
                self.target, lambda: recompute().steps(), self._limits(count > 1), planner,
                lambda made: made[0].placed.seconds,
            )  # fmt: skip
        except TooLarge as error:
            raise does_not_fit(error, self.target, self.job, graph, self.folder) from error
        train, packed = made.made
        self.notes += recompute_notes(train.placed, self.mesh.stages)
        return self._finish(train, packed)

    def _recompute(self, graph: Graph) -> Recompute:
        """What may be computed again; where there are pipeline stages, within the piece of each."""
        pieces: dict[Node, int] = {}
        if self.mesh.stages > 1:
            stages = self._cut(graph, self._layouts(graph, self._timed(graph), None, None))
            pieces = {n: c[0] for n, c in stages.nodes.items() if n not in graph.origins}
        all_again = self.target.pipeline.schedule == "gpipe"
        return Recompute(graph, self.machine, pieces, all_again)

    def _planner(self, graph: Graph, kept: Kept) -> Planner[Made]:
        """Plans for a graph in which the backward pass is given what is kept."""
        self.observe("recompute", "train", kept)
        timing = self._timed(graph)
        self.observe("micro-batches", "train", timing or "one micro-batch: the whole batch")

        @cache
        def fastest() -> Step:
            return self._train_step(graph, timing, None)

        def attempt(limit: Limit | None) -> Attempt[Made]:
            train = fastest()
            if limit is not None:
                train = self._train_step(graph, timing, limit, train.stages)
            elif guessed := self._guessed(train):
                return guessed
            train, packed = self._arranged(train, limit)
            if limit is None:
                train, packed = self._moved(train, packed)
            size = max(stage.nbytes for stage in packed)
            return Attempt((train, packed), size, partial(self._held, train))

        return attempt

    def _moved(self, train: Step, packed: list[Packed]) -> Made:
        """With nodes moved from stages that hold too much to others, if all stages then fit.

        What a stage holds besides its nodes is known from a plan, so others are made with these.
        """
        made, memory = (train, packed), self.target.memory
        for _ in range(_MOVES if memory else 0):
            arenas = [stage.nbytes for stage in made[1]]
            if max(arenas) <= memory:
                return made
            cut = moved(made[0], arenas, memory)
            if cut is None:
                break
            made = self._arranged(self._step(train.layouts, train.timing, cut), None)
        return made if max(stage.nbytes for stage in made[1]) <= memory else (train, packed)

    def _step(
        self,
        layouts: tuple[Placed, ...],
        timing: Timing | None,
        stages: Stages | None,
        zero: int = 0,
    ) -> Step:
        """A training step with these layouts on these stages; `zero` is how it is lowered."""
        self.observe("stages", "train", stages or f"one stage on mesh {self.mesh}")
        rows, zero = self.data["train"].batch, zero or self.target.zero or 0
        return hurried(make_step(layouts, "train", rows, self.target, timing, stages, zero))

    def _held(self, train: Step) -> float:
        """What the rank that holds most holds in training, as a limit counts it."""
        return max(self._held_by_stage(train))

    def _held_by_stage(self, train: Step) -> list[float]:
        """What a rank of each stage holds in training, those of each mesh together."""
        layouts = dict(zip(self.inside, train.layouts, strict=True))
        return [
            held
            for mesh, placed in layouts.items()
            for held in held_by_share(placed, self._shares(train.stages, mesh))
        ]

    def _guessed(self, train: Step) -> Attempt[Made] | None:
        """A step of a large model that exceeds the limit for certain, wherever it is cut."""
        if not self.target.memory or len(train.placed.nodes) < _MANY_NODES:
            return None
        held = self._held_by_stage(train)
        if sum(held) <= self.target.memory * self.mesh.stages:
            return None
        return Attempt((train, []), round(max(held) / _COUNTED), lambda: max(held), guessed=True)

    def _shares(self, stages: Stages | None, mesh: Mesh) -> tuple[Share, ...]:
        """What each of the stages that have this mesh has to hold."""
        if stages is None:
            return ()
        chosen = [stage for stage, inside in enumerate(self.inside) if inside == mesh]
        return shares_of(stages, self.target.pipeline, self.job.micro_batches, chosen)

    def _timed(self, graph: Graph) -> Timing | None:
        count = self.job.micro_batches
        if count == 1:
            return None
        nodes = len(graph.live())
        if count * nodes > MOST_FIRINGS:
            raise CompileError(
                f"{count} micro-batches of a model with {nodes} nodes are too many for one step;"
                f" take up to {MOST_FIRINGS // nodes}"
            )
        return divide(graph, count)

    def _limits(self, timed: bool) -> list[Limit]:
        """What may be split where the fastest layouts hold too much, in the order to be tried."""
        if self.target.zero is not None:
            return [Limit(0.0, zero=self.target.zero)]
        if timed:  # a copy for the backward pass would only be another one, see `lower`
            return [Limit(0.0, free=True, zero=1), Limit(0.0, free=True, zero=2)]
        return [Limit(0.0, free=True, zero=3)]

    def _arranged(self, train: Step, limit: Limit | None) -> tuple[Step, list[Packed]]:
        """All programs with layouts that keep a limit, and where they have what they hold.

        Those of each stage are placed for themselves, but put in order together.
        """
        graph, timed = train.placed.graph, train.timing is not None
        variables = [
            {
                name: stored(graph, name, placed.sources[v.tensor][timed:], mesh, self.folder)
                for name, v in graph.variables.items()
            }
            for placed, mesh in zip(train.layouts, self.inside, strict=True)
        ]
        evaluations = Evaluations(
            self.job, self.data, self.target, partial(self.graphs.traced, training=False),
            self._shares, self.observe, self.notes,
        )  # fmt: skip
        evaluating = [
            step
            for name in self.job.evaluations
            for step in evaluations.steps(name, train, variables, limit)
        ]
        while True:
            parts = [
                self._part(stage, train, evaluating, variables[stage])
                for stage in range(self.mesh.stages)
            ]
            packed = arrange_stages(parts, self.target, self.folder, self.observe)
            ahead, size = train.pipeline.ahead, max(stage.nbytes for stage in packed)
            if not ahead or not self.target.memory or size <= self.target.memory:
                return train, packed
            train = train.with_ahead(ahead // 2)

    def _train_step(
        self,
        graph: Graph,
        timing: Timing | None,
        limit: Limit | None,
        stages: Stages | None = None,
    ) -> Step:
        """A training step with the fastest layouts, or with those that keep a limit on `stages`."""
        layouts = self._layouts(graph, timing, limit, stages)
        if stages is None and self.mesh.stages > 1:
            stages = self._cut(graph, layouts)
        return self._step(layouts, timing, stages, limit.zero if limit else 0)

    def _layouts(
        self, graph: Graph, timing: Timing | None, limit: Limit | None, stages: Stages | None
    ) -> tuple[Placed, ...]:
        """The layouts for the ranks of each stage."""
        zero = self.target.zero or 0

        def chosen(inside: Mesh) -> Placed:
            mesh = inside.in_time(self.job.micro_batches)
            mine = limit and replace(limit, shares=self._shares(stages, inside))
            placed = choose(graph, mesh, self.machine, timing=timing, zero=zero, limit=mine)
            self.observe("signatures", "train", placed)
            return placed

        return self.target.on_each(chosen)

    def _cut(self, graph: Graph, layouts: tuple[Placed, ...]) -> Stages:
        """The cut of a graph into pipeline stages by the seconds of its kernels."""
        seconds = [placed.kernel_seconds() for placed in layouts]
        return assign_stages(graph, seconds, self.target.pipeline.virtual)

    def _part(
        self, stage: int, train: Step, evaluations: list[Step], variables: dict[str, Variable]
    ) -> tuple[list[Program], dict[str, Variable]]:
        """What a stage does in each step, and its variables."""
        graph, saved = train.part(stage).graph, variables
        if train.stages:
            chunks = {n: train.stages.variables[v.tensor] for n, v in graph.variables.items()}
            variables = {n: replace(variables[n], stage=stage) for n in chunks}
            # What several stages keep, the first of them saves.
            saved = {n: v for n, v in variables.items() if stage == train.stages.first(chunks[n])}
        shown, inside = averages(self.job, variables), self.inside[stage]
        programs = [
            lower_initialise(graph, variables, inside, self.machine),
            train.program(stage, variables),
            *(step.program(stage, shown) for step in evaluations),
            lower_save(saved, inside, self.machine),
        ]
        return [replace(program, stage=stage) for program in programs], variables

    def _finish(self, step: Step, packed: list[Packed]) -> Plan:
        process_bytes = max(map(self._process_bytes, packed))
        plan = assemble(
            self.job, self.data, self.target, step, packed, model=self.graphs.model,
            process_bytes=process_bytes, notes=self.notes, folder=self.folder,
        )  # fmt: skip
        plan = priced(plan, self.machine)
        self.observe("price", "all", plan)
        verify(plan)
        self.observe("verify", "all", f"plan of {self.job.name}: proven")
        return plan

    def _process_bytes(self, packed: Packed) -> int:
        """The memory of a process: Python, MPI and HDF5, the arena, what reading keeps."""
        read = reading_bytes(packed.programs, self.data, self.mesh, self.cache_bytes)
        return self.machine.process_bytes + packed.in_process(self.target.device) + read
