"""Session: one rank's slice of a plan, bound and ready to step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np

from mpiflow.errors import PlanError, TaskError
from mpiflow.exec.arena import Arena
from mpiflow.exec.bind import Binder, Step
from mpiflow.exec.collective import exchanged
from mpiflow.exec.device import Cpu, Device
from mpiflow.exec.engine import LONGEST_SLEEP_SECONDS, Engine
from mpiflow.exec.feed import FeedLane
from mpiflow.exec.finite import check_step
from mpiflow.exec.hazards import Hazards
from mpiflow.exec.lanes import Failed, Finding
from mpiflow.exec.meter import Meter
from mpiflow.exec.observe import Observer
from mpiflow.exec.position import Position
from mpiflow.exec.segments import InlineStream, Stream, attentive, timed
from mpiflow.exec.streams import ReadStream, ReadTask, WriteStream
from mpiflow.exec.trace import Recorder
from mpiflow.exec.transport import Group, Transport
from mpiflow.graph.mesh import STAGE
from mpiflow.graph.sbp import Box, Broadcast
from mpiflow.plan.places import CUDA_MPI, HOST, NCCL
from mpiflow.plan.protocols import Reader, Writer
from mpiflow.plan.records import COMPUTE, SEND, WRITE, Plan, Program, Register, Task
from mpiflow.plan.store import digest
from mpiflow.plan.unroll import folded
from mpiflow.plan.verify import verify
from mpiflow.plan.verify_places import arenas_by_space
from mpiflow.threads import threads_per_rank

Piece = tuple[str, tuple[int, ...], np.ndarray]
"""What is stored: its name, where in it this part begins, and the part."""


@dataclass(slots=True)
class _Bound:
    """A program ready to run. `fired` counts its steps; phases repeat."""

    program: Program
    steps: list[Step]
    outputs: list[tuple[str, np.ndarray]]
    read: ReadTask | None
    binder: Binder
    has_thread: bool
    observer: Observer | None = None
    fired: int = 0

    @property
    def phase(self) -> Step:
        """The lanes of the next step."""
        return self.steps[self.fired % len(self.steps)]

    @property
    def feed(self) -> FeedLane | None:
        """What copies the input of the step after that to a device."""
        return self.steps[(self.fired + 1) % len(self.steps)].feed


def _plain_thread(name: str, function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread


class Session:
    """Runs programs of a plan on this rank. Made and closed on all ranks together.

    `readers` gives a reader for each data set of the plan. `start_thread` starts the threads that
    read and write, and sees to it that what they raise reaches this one. With `check_finite` a task
    that makes nan or infinity is a TaskError.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        readers: dict[str, Reader] | None = None,
        *,
        start_thread: Callable[[str, Callable[[], None]], threading.Thread] = _plain_thread,
        device: Device | None = None,
        check_finite: bool = False,
    ) -> None:
        """Collective."""
        self._check_finite = check_finite
        if transport.size != plan.mesh.size:
            raise PlanError(f"the plan is for {plan.mesh.size} ranks, there are {transport.size}")
        verify(plan)
        transport.check_same("plan digest", digest(plan))
        self.mesh = plan.mesh
        stage, place = plan.mesh.stage_of(transport.rank)
        self.plan, self.transport, self.place = plan.at_stage(stage), transport, place
        self.rank = self.plan.slice(place)
        self.device: Device = device or Cpu()
        self.groups = self._make_groups(plan, stage)
        self.direct = self._make_direct(plan, stage)
        if plan.device != self.device.kind:
            raise PlanError(f"the plan is for a {plan.device!r}, the ranks have {self.device.kind}")
        self.arenas = {
            space: Arena(self.device, nbytes, space)
            for space, nbytes in arenas_by_space(self.plan).items()
        }
        self.arena = self.arenas[""]
        self.arena.share(transport, self._exchanged(plan, stage))
        self.engine = Engine(transport, self.device.advance)
        self._hosts = len(set(transport.all_gather(transport.host.encode())))
        self._inline: Stream = InlineStream()
        self._streams: dict[str, Stream] = {}  # made when first needed
        self.reads = ReadStream(start_thread, self.engine.wake)
        self.writes = WriteStream(start_thread, self._check)
        self.variables = {
            v.name: self.arena.view(v.offset, self.rank.shape(v), v.dtype)
            for v in self.plan.variables
        }
        self._readers = readers or {}
        self._programs = {p.name: self._bind(p) for p in self.plan.programs}
        remarks = [data.decode() for data in transport.all_gather(transport.remark.encode())]
        self.remark = next(filter(None, remarks), "")
        """What a user should know of how the ranks talk, alike on all of them."""

    def _make_groups(self, plan: Plan, stage: int) -> dict[str, Group]:
        """A communicator for each set of axes of the stage, and one of the ranks of all stages."""
        groups: dict[str, Group] = {}
        for axis in plan.communicators():
            members = (plan.mesh.rank_in_stage(stage, rank) for rank in self.rank.members(axis))
            groups[axis] = self.transport.group(tuple(members), axis)
        if plan.mesh.stages > 1:
            groups[STAGE] = self.transport.group(tuple(range(plan.mesh.size)), STAGE)
        return groups

    def _make_direct(self, plan: Plan, stage: int) -> dict[str, Group]:
        """The same for what goes from device to device."""
        if any(task.route == CUDA_MPI for p in plan.programs for task in p.tasks):
            return {axis: self.device.direct(group) for axis, group in self.groups.items()}
        tasks = [(p, task) for p in plan.programs for task in p.tasks if task.route == NCCL]
        found: dict[str, Group] = {}
        for axis in plan.communicators() if tasks else ():
            members = (plan.mesh.rank_in_stage(stage, rank) for rank in self.rank.members(axis))
            found[axis] = self.device.group(self.transport, self.groups[axis], tuple(members))
        links = {(p.stage, task.attributes["stage"]) for p, task in tasks if task.kind == SEND}
        if links:
            stages = [plan.mesh.stage_of(rank)[0] for rank in range(plan.mesh.size)]
            found[STAGE] = self.device.links(
                self.transport, self.groups[STAGE], stages, sorted(links)
            )
        return found

    def _exchanged(self, plan: Plan, stage: int) -> list[tuple[int, int]]:
        """The bytes of the arena that collectives within this host read and write."""
        if plan.device != HOST:
            return []
        found = []
        for program in self.plan.programs:
            registers = self.plan.tensors(program)
            for task in (task for task in program.tasks if task.kind == "collective"):
                ranks = [plan.mesh.rank_in_stage(stage, r) for r in self.rank.members(task.axis)]
                if self.transport.are_neighbours(ranks):
                    found += exchanged(task, registers)
        return found

    def _has_thread(self, binder: Binder) -> bool:
        """Whether kernels run on a thread of their own, beside the messages of their program.

        Within a host, messages are copies that ranks make themselves: with one core each no time
        can be hidden. Between hosts, looks between kernels do as well as a thread on the same core,
        and cost less, if kernels are short.
        """
        if not binder.communicates:
            return False
        if threads_per_rank(os.environ) > 1:
            return self._hosts > 1 or self.plan.overlap
        return self._hosts > 1 and binder.has_long_kernels

    def _check(self) -> None:
        if self.transport.check is not None:
            self.transport.check()

    def _bind(self, program: Program) -> _Bound:
        reads: list[ReadTask] = []
        binder = Binder(
            program,
            self.plan.tensors(program),
            self.plan.slice(self.place, program),
            self.mesh,
            self.arenas,
            self.groups,
            self.direct,
            lambda stream, micro: self.reads.give_back(reads[0], stream, micro),
            polled=self.transport.polled,
        )
        views = [binder.views(phase) for phase in range(binder.phases)]
        read = self._read_task(binder, program, views)
        reads += [read] if read else []
        steps = [binder.step(phase) for phase in range(binder.phases)]
        if self._check_finite:
            for step, arrays in zip(steps, views, strict=True):
                check_step(step, arrays)
        if self.device.hazards is not None:
            self._watch(self.device.hazards, binder, steps, views, read)
        has_thread = self.plan.device == HOST and self._has_thread(binder)
        if self.plan.device == HOST and binder.communicates and not has_thread:
            for lane in (step.kernels for step in steps):
                if lane is not None:
                    lane.segments = tuple(
                        attentive(each, self.engine.look, LONGEST_SLEEP_SECONDS)
                        for each in lane.segments
                    )
        outputs = [(o.name, views[0][o.register]) for o in binder.program.outputs]
        return _Bound(program, steps, outputs, read, binder, has_thread)

    def _watch(
        self,
        hazards: Hazards,
        binder: Binder,
        steps: list[Step],
        views: list[dict[str, np.ndarray]],
        read: ReadTask | None,
    ) -> None:
        """Have every use of memory checked, in all phases."""
        name, turns = binder.program.name, binder.program.micro_batches
        watched = [
            hazards.watch(binder, step, arrays, lambda: self._programs[name].fired)
            for step, arrays in zip(steps, views, strict=True)
        ]
        if read is not None:

            def guard(firing: int) -> str:
                step, micro = divmod(firing, turns)
                return watched[step % len(watched)].refill(binder.reads[micro], step)

            read.guard = guard

    def _read_task(
        self, binder: Binder, program: Program, views: list[dict[str, np.ndarray]]
    ) -> ReadTask | None:
        reads = binder.reads
        if not reads or program.data not in self._readers:
            return None
        spans: list[tuple[int, int]] = []
        for task in reads:
            rows = {binder.rank.box(binder.registers[name])[0] for name in task.outputs}
            if len(rows) > 1:
                raise PlanError(f"{task.name}: fields are split in different ways: {sorted(rows)}")
            spans += rows
        attributes = reads[0].attributes
        fields, limits = attributes["fields"], attributes.get("limits", ())
        ignored = attributes.get("ignored") or [[] for _ in fields]
        return ReadTask(
            reads,
            self._readers[program.data],
            spans,
            [
                dict(zip(fields, (v[n] for n in t.outputs), strict=True))
                for v in views
                for t in reads
            ],
            min(binder.registers[name].slots for name in reads[0].outputs),
            binder.users,
            {f: (n, v) for f, n, v in zip(fields, limits, ignored, strict=False) if n},
            self.transport.name,
        )

    def has(self, program: str) -> bool:
        """Whether the plan has such a program."""
        return program in self._programs

    def expect(self, program: str, steps: range) -> None:
        """Let the read stream begin on these steps."""
        read = self._programs[program].read
        if read is not None:
            self.reads.expect(read, steps)

    def forget(self, program: str) -> None:
        """Drop steps that were expected but will not run."""
        bound = self._programs[program]
        if bound.read is not None:
            if (feed := bound.phase.feed) is not None:
                self.engine.finish(feed)
                self._drop(feed)
            self.reads.forget(bound.read)
            bound.fired = bound.read.filled // bound.program.micro_batches

    def observe(self, program: str, meter: Meter, steps: range) -> Recorder:
        """Count in `meter` where the time of a program's steps goes; gives what records `steps`."""
        bound = self._programs[program]
        recorder = Recorder(bound.binder.program, steps)
        bound.observer = Observer(bound.steps, meter, recorder)
        if bound.read is not None:
            reads = bound.binder.reads

            def tell(step: int, micro: int, over: bool) -> None:
                (recorder.ended if over else recorder.began)(reads[micro], step)

            bound.read.tell = tell
        return recorder

    def run(self, program: str, step: int = 0) -> dict[str, float]:
        """Collective. One step of a program; gives its outputs. `step` is for messages only."""
        bound = self._programs[program]
        with self.device.quiet():
            self._run(bound, step)
        return {name: float(value[()]) for name, value in bound.outputs}

    def _run(self, bound: _Bound, step: int, kernels: Stream | None = None) -> None:
        """Collective. One step; its kernels on that stream, if any is named."""
        program, phase = bound.program, bound.phase
        if (lane := phase.reads) is not None:
            if bound.read is None:
                raise PlanError(
                    f"program {program.name} reads data set {program.data!r}: no reader"
                )
            lane.use(bound.read, bound.fired * program.micro_batches)
        for device_lane in phase.on_device:
            named = kernels if device_lane is phase.kernels else None
            device_lane.use(named or self._stream(bound, device_lane.stream))
        if self.device.hazards is not None:
            self.device.hazards.begin(phase)
        if bound.observer:
            bound.observer.begin(phase, step)
        try:
            self.engine.run(phase.lanes, program.name, step, self._hurried(bound, step))
        except BaseException as error:
            self._end_streams()
            if isinstance(error, Failed):
                cause = error.__cause__
                foreseen = isinstance(cause, Finding)
                explained = self._explained(error, program, step + error.later)
                raise explained from (None if foreseen else cause)
            raise
        if bound.observer:
            bound.observer.end()
        bound.fired += 1

    def _hurried(self, bound: _Bound, step: int) -> FeedLane | None:
        """What feeds the step after this one, as far as it is read, and its slots are free."""
        feed, read = bound.feed, bound.read
        if feed is None or read is None:
            return None
        stream, firings = self._stream(bound, feed.stream), bound.program.micro_batches
        feed.hurry(stream, bound.phase.lanes, read, (bound.fired + 1) * firings, step + 1)
        if self.device.hazards is not None:
            self.device.hazards.prepare(feed)
        return feed

    def _drop(self, feed: FeedLane) -> None:
        """What was begun for a step that does not come."""
        feed.early = False
        if self.device.hazards is not None:
            self.device.hazards.drop(feed)

    def _stream(self, bound: _Bound, name: str) -> Stream:
        """Where kernels run."""
        if self.plan.device == HOST and not bound.has_thread:
            return self._inline
        if name not in self._streams:
            self._streams[name] = self.device.stream(name, self.engine.wake)
        return self._streams[name]

    def _end_streams(self) -> None:
        """After a failure nothing that was submitted is done any more; the next step is new."""
        for stream in self._streams.values():
            stream.close()
        for bound in self._programs.values():
            for step in bound.steps:
                if step.feed is not None:
                    self._drop(step.feed)
        self._inline, self._streams = InlineStream(), {}

    def _explained(self, failed: Failed, program: Program, step: int) -> TaskError:
        task, error = failed.task, failed.__cause__
        micro = f" micro-batch {task.micro + 1}," if task.phase % 2 else ""
        what = error if isinstance(error, Finding) else f"{type(error).__name__}: {error}"
        where = f"\n  {task.where}" if task.where else ""  # copies of several have no line
        return TaskError(
            f"{self.transport.name}: program {program.name}, step {step + 1},{micro} task"
            f" {folded(task)} ({task.op}): {what}{where}"
        )

    def position(self) -> Position:
        """Where this rank is; any thread may ask."""
        return self.engine.position()

    def thread(self) -> int | None:
        """The thread on which a kernel runs, if one does beside this one; any thread may ask."""
        stream = self._streams.get(COMPUTE)
        return stream.thread if stream is not None and stream.task() is not None else None

    def timed(self, program: str) -> list[tuple[Task, float]]:
        """Collective. One step of a program: its kernels in order, and the seconds of each.

        On the host they run where messages are made, beside nothing else.
        """
        bound = self._programs[program]
        lane = bound.phase.kernels
        measured: list[tuple[Task, float]] = []
        with self.device.quiet():
            if lane is None:
                self._run(bound, 0)
                return []
            on_host = self.plan.device == HOST
            stream = InlineStream() if on_host else self._stream(bound, lane.stream)
            plain = lane.segments
            lane.segments = tuple(timed(segment, stream, measured) for segment in plain)
            try:
                self._run(bound, 0, stream)
            finally:
                lane.segments = plain
        kernels: dict[str, tuple[Task, float]] = {}
        for task, seconds in measured:
            # After its kernel a task may have one call more, which gives back what it read.
            kernels.setdefault(task.name, (task, seconds))
        return list(kernels.values())

    def save(self, writer: Writer) -> None:
        """Collective. Snapshot all variables; they are stored beside the next steps."""
        self.writes.wait()
        self.run("save")
        self._store(writer, self._staged("save", "variable"))

    def predict(self, program: str, step: int, writer: Writer) -> None:
        """Collective. A step whose rows are stored beside the next one, from the other slot."""
        firing = self._programs[program].fired
        self.run(program, step)
        self.writes.wait()
        self._store(writer, self._staged(program, "output", firing))

    def _store(self, writer: Writer, pieces: list[Piece]) -> None:
        """Begin to write these beside the next steps."""
        self.writes.begin(writer, pieces)
        if self.device.hazards is not None:
            arrays = (array for _, _, array in pieces)
            self.device.hazards.store(arrays, lambda: not self.writes.idle)

    def _staged(self, program: str, key: str, firing: int = 0) -> list[Piece]:
        """What this rank has to store: the name at attribute `key`, where it begins, the array."""
        records = self._programs[program].program
        registers = {r.name: r for r in records.registers}
        pieces = []
        for task in (t for t in records.tasks if t.stream == WRITE):
            register = registers[task.inputs[0]]
            if self._is_writer(register):
                start = tuple(first for first, _ in self.rank.box(register))
                offset = register.offset + firing % register.slots * register.nbytes
                arena = self.arenas[register.space]
                view = arena.view(offset, self.rank.shape(register), register.dtype)
                pieces.append((task.attributes[key], start, view))
        return pieces

    def _is_writer(self, register: Register) -> bool:
        """Of the ranks that hold the same part, the first one; nobody writes an empty part."""
        first = all(
            not isinstance(sbp, Broadcast) or not index
            for sbp, index in zip(register.layout, self.rank.coordinates, strict=True)
        )
        return first and prod(self.rank.shape(register)) > 0

    @contextmanager
    def filling(self) -> Iterator[dict[str, np.ndarray]]:
        """The variables as arrays of the host; what is put into them counts at the end."""
        arrays = {name: self.device.fetch(array) for name, array in self.variables.items()}
        yield arrays
        for name, array in self.variables.items():
            if array is not arrays[name]:
                self.device.fill(array, arrays[name])

    def boxes(self) -> dict[str, Box]:
        """Which part of each variable this rank holds."""
        return {v.name: self.rank.box(v) for v in self.plan.variables}

    @property
    def sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        groups = {id(group): group for group in (*self.groups.values(), *self.direct.values())}
        return sum(group.sent for group in groups.values())

    def close(self) -> None:
        """Let the threads end."""
        self.writes.wait()
        self.reads.close()
        self._end_streams()
        self.arena.unshare(self.transport)
        self.device.close()
