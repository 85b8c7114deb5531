"""Hazards: finds uses of memory that nothing keeps apart, by what each has really waited for.

Every item of a lane has a clock: of each stream, how many items are surely done when it starts.
That follows from what it waited for and what they had waited for, never from timing, so that a
missing wait is found though all happened to go well. That it has waited for all of it is looked at
too, when the host starts it and when the device does. Each task is held to its clock:

    reads     who made it is done; its bytes still hold it; they are memory that the task reaches
    writes    those who wrote the bytes before, and all who have read them since, are done

What is read from files and stored in them is beside the streams: a slot is filled when those who
used it are really done, and nothing is overwritten while it is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpiflow.errors import TaskError
from mpiflow.exec.feed import FeedLane
from mpiflow.exec.lanes import DeviceLane, Finding, Lane, ReadLane
from mpiflow.exec.segments import Call, Segment
from mpiflow.exec.shadow import Cell, Clock, Owner, Run, Shadow, Use
from mpiflow.exec.waited import check_device, check_host
from mpiflow.plan.places import D2H, H2D, PINNED, STAGED, workspace_space
from mpiflow.plan.records import READ, Task
from mpiflow.plan.registers import holder
from mpiflow.plan.unroll import folded

if TYPE_CHECKING:
    from mpiflow.exec.bind import Binder, Step

POISON = 0xFF
"""The bytes of memory that holds nothing: NaN in every kind of floating-point numbers."""
Known = dict[int, Clock]
"""What is surely done of the runs that are at work, by their identity."""
Span = tuple[str, int, int]
"""Space, first byte, and byte after the last."""
_SPACES = {"": "device", PINNED: "pinned"}


@dataclass(frozen=True, slots=True)
class _Operand:
    """A tensor of a task, as it knows it, and the bytes of it that this rank has."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class _Uses:
    """What a task takes and gives; of what it gives, and its workspace, what is new to it."""

    reads: tuple[_Operand, ...]
    writes: tuple[_Operand, ...]
    fresh: tuple[np.ndarray, ...]


class Hazards:
    """The memory of one rank, and who has used it. Any thread may call."""

    def __init__(self) -> None:
        self._shadows: dict[str, Shadow] = {}
        self._lock = threading.Lock()
        self._run = Run(number=0)
        self._prepared: dict[FeedLane, Run] = {}
        self._saves = 0
        self._storing: Callable[[], bool] = lambda: False

    def add(self, space: str, memory: np.ndarray) -> None:
        """Look after the memory of a space."""
        self._shadows[space] = Shadow(memory)

    def filled(self, array: np.ndarray) -> None:
        """A variable got values between steps."""
        with self._lock:
            for cell in self._cells(self._span(array)):
                cell.writer, cell.readers = None, {}
                cell.owner = cell.owner or _FILLED

    def begin(self, step: Step) -> None:
        """A step begins; all that was done in those before is done."""
        with self._lock:
            feed = step.feed
            run = self._prepared.pop(feed, Run()) if feed is not None else Run()
            run.number = self._run.number + 1
            run.lanes = {lane.stream: lane for lane in step.lanes}
            run.clocks = {lane.stream: [] for lane in step.lanes} | run.clocks
            self._run = run

    def prepare(self, feed: FeedLane) -> None:
        """What feeds a step may begin before it."""
        with self._lock:
            self._prepared[feed] = Run({feed.stream: feed}, {feed.stream: []})

    def drop(self, feed: FeedLane) -> None:
        """That step does not come; what was begun for it is done."""
        with self._lock:
            if (run := self._prepared.pop(feed, None)) is not None:
                run.number = self._run.number

    def store(self, arrays: Iterable[np.ndarray], storing: Callable[[], bool]) -> None:
        """From now on, while `storing` says so, these are being written to files."""
        with self._lock:
            self._saves, self._storing = self._saves + 1, storing
            for array in arrays:
                for cell in self._cells(self._span(array)):
                    cell.stored = self._saves

    def watch(
        self,
        binder: Binder,
        step: Step,
        views: Mapping[str, np.ndarray],
        fired: Callable[[], int],
    ) -> Watched:
        """Look at all that the lanes of a step start. `fired` says how many steps were before."""
        watched = Watched(self, binder, views, fired)
        for lane in step.lanes:
            if not isinstance(lane, ReadLane):
                watched.attach(lane)
        return watched

    def _span(self, array: np.ndarray) -> Span:
        for space, shadow in self._shadows.items():
            if shadow.start <= array.ctypes.data < shadow.stop:
                return space, *shadow.span(array)
        raise TaskError(f"an array of {array.nbytes} bytes lies in no memory of the plan")

    def _cells(self, span: Span) -> list[Cell]:
        space, start, stop = span
        return self._shadows[space].cells(start, stop) if start < stop else []

    def _being_stored(self, cell: Cell) -> bool:
        return cell.stored == self._saves > 0 and self._storing()


_FILLED: Owner = ("", "values from the host", 0)
_OF_READS = Run()
"""Reads belong to no step; the firing of one is known by who waits for it."""


class Watched:
    """The tasks of one program, in one phase of its slots, as its hazards see them."""

    def __init__(
        self,
        hazards: Hazards,
        binder: Binder,
        views: Mapping[str, np.ndarray],
        fired: Callable[[], int],
    ) -> None:
        self._all, self._views, self._fired = hazards, views, fired
        self._program, self._registers = binder.program, binder.registers
        self._made_here = {register.name for register in binder.program.registers}
        self._roots = {name: holder(name, binder.registers) for name in binder.registers}
        self._variables = binder.registers.keys() - self._made_here
        self._makers = {n: t for t in binder.program.tasks for n in t.outputs}
        self._item = {
            task.name: number
            for items in binder.items.values()
            for number, item in enumerate(items)
            for task in item.tasks
        }
        self._uses = {
            task.name: self._uses_of(task)
            for stream, items in binder.items.items()
            for item in items
            for task in item.tasks
        }

    def attach(self, lane: Lane) -> None:
        """Look at the items of a lane from now on, and let what they write be poisoned first."""
        if isinstance(lane, DeviceLane):
            lane.segments = tuple(
                self._guarded(lane, number, self._poisoned(segment))
                for number, segment in enumerate(lane.segments)
            )
        lane.look = lambda number: self._start(lane, number)

    def refill(self, task: Task, step: int) -> str:
        """What is wrong with reading what a step will take now; "" if nothing is."""
        uses = self._uses[task.name]
        with self._all._lock:
            for operand in uses.writes:
                for cell in self._all._cells(operand.span):
                    others = [use for use in cell.readers.values() if not self._is_done(use)]
                    if others:
                        return f"fills {_shown(operand.name)} anew, which {_who(others[0])} reads"
                    cell.owner, cell.readers = self._owner(operand.name, step), {}
                    cell.writer = Use(task, READ, self._item[task.name], _OF_READS)
            for array in uses.fresh:
                array.fill(POISON)
        return ""

    def _is_done(self, use: Use) -> bool:
        """Whether a use is over, whoever knows it. Steps drain."""
        over = use.run.number < self._all._run.number
        return over or use.run.lanes[use.stream].done > use.number

    def _uses_of(self, task: Task) -> _Uses:
        source, target = _reach(task)
        reads = tuple(self._operand(n, source, task, "reads") for n in task.inputs)
        writes = tuple(self._operand(n, target, task, "writes") for n in task.outputs)
        fresh = [
            self._views[name]
            for name in task.outputs
            if name in self._made_here and not self._registers[name].aliases
        ]
        if task.workspace[1]:
            offset, nbytes = task.workspace
            shadow = self._all._shadows[workspace_space(task.route)]
            fresh.append(shadow.memory[offset : offset + nbytes])
            span = workspace_space(task.route), offset, offset + nbytes
            work = _Operand(f"the workspace of {folded(task)}", span)
            writes += (work,)
        return _Uses(reads, writes, tuple(_bytes_of(array) for array in fresh if array.nbytes))

    def _operand(self, name: str, space: str, task: Task, verb: str) -> _Operand:
        array = self._views[name]
        span = self._all._span(array) if array.nbytes else (space, 0, 0)
        if span[0] != space:
            raise TaskError(
                f"{folded(task)}: {verb} {name}, which lies in {_SPACES[span[0]]} memory; it can"
                f" only reach {_SPACES[space]} memory\n  {task.where}"
            )
        return _Operand(name, span)

    def _owner(self, name: str, step: int) -> Owner:
        root = self._roots.get(name, name)
        if root in self._variables:
            return "", root, 0
        return self._program.name, name, step

    def _poisoned(self, segment: Segment) -> Segment:
        """Each task finds NaN where it is the first to write."""
        calls: list[Call] = []
        seen: set[str] = set()
        for task, call in zip(segment.tasks, segment.calls, strict=True):
            fresh = self._uses[task.name].fresh
            if task.name in seen or not fresh:
                calls.append(call)
            else:
                calls.append(_after(partial(_poison, fresh), call))
            seen.add(task.name)
        return replace(segment, calls=tuple(calls))

    # -- what a lane starts

    def _guarded(self, lane: DeviceLane, number: int, segment: Segment) -> Segment:
        """One that finds out, when the device comes to it, whether it was given all its events."""
        check = partial(check_device, lane, number, lambda: self._all._run.lanes)
        first, *rest = segment.calls
        return replace(segment, calls=(_after(check, first), *rest))

    def _start(self, lane: Lane, number: int) -> None:
        """An item is about to start; Finding if it would use what others may still use."""
        check_host(lane, number, self._all._run.lanes)
        with self._all._lock:
            run = self._all._run
            if isinstance(lane, FeedLane) and lane.early:
                run = self._all._prepared[lane]
            known = self._tick(lane, number, run)
            step = self._fired() + (run is not self._all._run)
            for task in lane.items[number].tasks:
                use = Use(task, lane.stream, number, run)
                uses = self._uses[task.name]
                for operand in uses.reads:
                    self._read(operand, use, known, step)
                for operand in uses.writes:
                    self._write(operand, use, known, step)
        if not isinstance(lane, DeviceLane):
            for task in lane.items[number].tasks:
                for array in self._uses[task.name].fresh:
                    array.fill(POISON)

    def _tick(self, lane: Lane, number: int, run: Run) -> Known:
        """What is surely done when an item starts; an item that is done has done this too."""
        own, item = run.clocks[lane.stream], lane.items[number]
        clock = dict(own[-1]) if own else {}
        if isinstance(lane, DeviceLane):
            clock[lane.stream] = number
        now = self._all._run
        if run is now:
            _wait(clock, item.waits, now)
        else:  # it waits for reads of its own step, and for others in the one at work
            _wait(clock, [(s, count) for s, count in item.waits if s == READ], run)
        own.append(clock)
        if run is now:
            return {id(run): clock}
        before: Clock = {}
        _wait(before, [(lane.stream, now.lanes[lane.stream].count), *(item.early or ())], now)
        return {id(run): clock, id(now): before}

    def _ordered(self, use: Use, known: Known, after: Use) -> bool:
        """Whether a use is surely over when another starts."""
        run = after.run if use.stream == READ else use.run
        if run.number < self._all._run.number:
            return True
        same = (use.stream, use.number, use.run) == (after.stream, after.number, after.run)
        return same or known.get(id(run), {}).get(use.stream, 0) > use.number

    def _read(self, operand: _Operand, use: Use, known: Known, step: int) -> None:
        name = operand.name
        owner = self._owner(name, step)
        maker = self._makers.get(name)
        if maker is not None and owner[0]:
            made = Use(maker, maker.stream, self._item[maker.name], use.run)
            if not self._ordered(made, known, use):
                raise Finding(f"reads {_shown(name)} without waiting for {_who(made)}", use.task)
        for cell in self._all._cells(operand.span):
            if cell.owner is None:
                raise Finding(f"reads {_shown(name)}, which nothing has written", use.task)
            if cell.owner != owner and cell.owner is not _FILLED:
                held = _held(cell, owner)
                raise Finding(f"reads {_shown(name)}, but its bytes now hold {held}", use.task)
            if cell.writer is not None and not self._ordered(cell.writer, known, use):
                what = f"reads {_shown(name)} without waiting for {_who(cell.writer)}"
                raise Finding(what, use.task)
            cell.readers[use.stream] = use

    def _write(self, operand: _Operand, use: Use, known: Known, step: int) -> None:
        name = operand.name
        for cell in self._all._cells(operand.span):
            before = [*cell.readers.values(), *([cell.writer] if cell.writer else [])]
            for other in before:
                if not self._ordered(other, known, use):
                    verb = "writes" if other is cell.writer else _taking(other.task)
                    what = _shown(cell.owner[1] if cell.owner else name)
                    held = "" if what == _shown(name) else f" with {_shown(name)}"
                    text = f"overwrites {what}{held}, which {_who(other)} still {verb}"
                    raise Finding(text, use.task)
            if self._all._being_stored(cell):
                raise Finding(f"overwrites {_shown(name)}, which is still being stored", use.task)
            cell.owner, cell.writer, cell.readers = self._owner(name, step), use, {}


def _wait(clock: Clock, waits: Iterable[tuple[str, int]], run: Run) -> None:
    """Add what is done when so many items of these streams of a run are."""
    for stream, count in waits:
        if stream != READ and count:
            for other, known in run.clocks[stream][count - 1].items():
                clock[other] = max(clock.get(other, 0), known)
        clock[stream] = max(clock.get(stream, 0), count)


def _after(before: Call, call: Call) -> Call:
    """Both calls; a message stays what its stream has to see it as."""
    others = getattr(call, "before", None)
    if others is not None:
        others.insert(0, before)
        return call

    def both() -> None:
        before()
        call()

    return both


def _poison(arrays: tuple[np.ndarray, ...]) -> None:
    for array in arrays:
        array.fill(POISON)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _reach(task: Task) -> tuple[str, str]:
    """The memory that a task takes from, and that it gives to."""
    if task.kind in (H2D, D2H):
        return (PINNED, "") if task.kind == H2D else ("", PINNED)
    on_host = task.route == STAGED or task.kind == READ
    return (PINNED, PINNED) if on_host else ("", "")


def _shown(name: str) -> str:
    """A tensor as the plan knows it; the micro-batch is told of the task."""
    return name.partition("#")[0]


def _who(use: Use) -> str:
    micro = f" of micro-batch {use.task.micro + 1}" if "#" in use.task.name else ""
    return f"{folded(use.task)}{micro} on {use.stream}"


def _held(cell: Cell, wanted: Owner) -> str:
    """What a cell holds, where that is not what was wanted."""
    assert cell.owner is not None
    by = f" (written by {_who(cell.writer)})" if cell.writer else ""
    if cell.owner[:2] == wanted[:2]:
        return f"that of step {cell.owner[2] + 1}{by}"
    tensor, _, micro = cell.owner[1].partition("#")
    if tensor == _shown(wanted[1]):
        return f"that of micro-batch {int(micro) + 1}{by}"
    return f"{_shown(cell.owner[1])}{by}"


def _taking(task: Task) -> str:
    return "sends" if task.kind == "send" else "reads"
