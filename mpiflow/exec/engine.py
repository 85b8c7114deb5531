"""Engine: one thread of a rank goes through all streams of a step, and sleeps in between.

What each stream does, and waits for, is in its lane, see `exec.lanes`. This thread makes all calls
of MPI, which makes progress only while it is called. Nothing orders the lanes but what their items
wait for; `plan.verify` proves that they come to their ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from threading import Lock

from mpiflow.exec.feed import FeedLane
from mpiflow.exec.lanes import DeviceLane, KernelLane, Lane
from mpiflow.exec.position import Position
from mpiflow.exec.transport import Transport

_SPIN_SECONDS = 50e-6
_YIELD_SECONDS = 1e-3
_PATIENCE = 4
"""So many times what is in flight is predicted to take, the engine waits for it without sleep."""
_LOOKS = 8
"""How often what is in flight is looked at before the other lanes are."""
_SHORTEST_SLEEP_SECONDS = 50e-6
LONGEST_SLEEP_SECONDS = 200e-6
"""How often what is in flight is looked at beside kernels."""
_CHECK_SECONDS = 0.05
"""How often `check` is called where nothing happens."""


class Bell:
    """What ends a sleep. Rings count once, and last until the next wait.

    A lock, which is held for as long as the bell has not rung. A queue will not do: the timeout of
    `SimpleQueue.get` (Python 3.11), interrupted by a signal when it is just over, never ends.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """End the wait that is under way, or the next one. Any thread may call."""
        try:
            self._lock.release()
        except RuntimeError:  # it is not held: the bell has rung before
            return

    def wait(self, seconds: float) -> bool:
        """Until it rings, or for so long; whether it has rung."""
        return self._lock.acquire(timeout=seconds)


class Engine:
    """Runs steps on the thread that made it; other threads may call `wake` and `position`."""

    def __init__(self, transport: Transport, advance: Callable[[], bool] | None = None) -> None:
        """`advance` is called when nothing can move, and says whether it has changed that."""
        self._transport, self._advance = transport, advance
        self._bell = Bell()
        self._lanes: Sequence[Lane] = ()
        self._program, self._step, self._runs = "", 0, 0
        transport.wake = self.wake

    def wake(self) -> None:
        """Something is done that the engine may be waiting for."""
        self._bell.ring()

    def look(self) -> None:
        """Let what is in flight go on, between kernels of this thread."""
        for lane in self._lanes:
            if lane.polled and lane.started > lane.done:
                lane.has_news()

    def run(
        self, lanes: Sequence[Lane], program: str, step: int, feed: FeedLane | None = None
    ) -> None:
        """Bring all lanes to their ends. Raises Failed, or what a transport raises.

        Beside them the `feed` of the next step goes as far as it can.
        """
        for lane in lanes:
            lane.begin()
        self._runs += 1
        self._program, self._step, self._lanes = program, step, lanes
        sleep = Sleep(self._bell, self._advance)
        in_sight = lanes if feed is None else (*lanes, feed)
        last = None
        while True:
            moved = feed is not None and feed.move()
            for lane in lanes:
                if lane.move():
                    moved, last = True, lane
            if moved:
                sleep.reset()
                continue
            if all(lane.done == lane.count for lane in lanes):
                break
            if self._advance is not None and self._advance():
                continue
            if self._transport.check is not None:
                self._transport.check()
            sleep.pass_time(in_sight)
        for lane in lanes:
            if isinstance(lane, KernelLane) and last is not None:
                lane.end(last)
        self._lanes = ()

    def finish(self, lane: Lane) -> None:
        """Wait between steps until what a lane has started is done."""
        sleep = Sleep(self._bell, self._advance)
        while lane.done < lane.started:
            if not lane.move() and not (self._advance is not None and self._advance()):
                if self._transport.check is not None:
                    self._transport.check()
                sleep.pass_time((lane,))

    def position(self) -> Position:
        """Where the rank is; any thread may ask."""
        lanes, runs = self._lanes, self._runs
        if not lanes:
            return Position(runs)
        done = tuple((lane.stream, lane.tasks_done()) for lane in lanes)
        task = next((l.running() for l in lanes if isinstance(l, KernelLane)), None)
        seconds = task.seconds if task is not None else _slowest(lanes)
        return Position(runs, self._program, self._step, done, task is not None, seconds)


def _slowest(lanes: Sequence[Lane]) -> float:
    """The longest that what the lanes have in hand is predicted to take, in seconds."""
    heads = (lane.items[lane.done].tasks[0] for lane in lanes if lane.done < lane.count)
    return max((task.seconds for task in heads), default=0.0)


class Sleep:
    """How the engine passes the time between two looks at its lanes.

    With nothing in flight it sleeps until woken. While kernels run beside what is in flight it
    polls every 200 us, since their core may be this one's. Where kernels wait for what is in flight
    it spins for 50 us, then yields the core up to 1 ms, or to several times the predicted time of
    what is in flight, and only then sleeps: MPI moves a long message on in small pieces, each of
    which is sent while both ranks are in its calls.
    """

    def __init__(self, bell: Bell, advance: Callable[[], bool] | None = None) -> None:
        self._bell, self._advance = bell, advance
        self.reset()

    def reset(self) -> None:
        """Something has happened."""
        self._began = self._limit = 0.0
        self._sleep = _SHORTEST_SLEEP_SECONDS

    def pass_time(self, lanes: Sequence[Lane]) -> None:
        """Until woken, or until something that is polled is done, or for a while."""
        in_flight = [lane for lane in lanes if lane.started > lane.done]
        polled = [lane for lane in in_flight if lane.polled]
        if not polled:
            self._bell.wait(_CHECK_SECONDS)
        elif any(isinstance(lane, DeviceLane) for lane in in_flight) or not self._is_short(polled):
            self._doze(polled)
        else:
            self._watch(polled)

    def _watch(self, polled: list[Lane]) -> None:
        """Look at what is in flight alone, which is quicker than to go through all lanes."""
        for _ in range(_LOOKS):
            if any(lane.has_news() for lane in polled):
                return

    def _doze(self, polled: list[Lane]) -> None:
        # Lanes that nothing happens in are not looked at: a kernel on this core has left Python a
        # cold cache.
        until = time.perf_counter() + _CHECK_SECONDS
        while not self._bell.wait(self._sleep) and time.perf_counter() < until:
            self._sleep = min(2 * self._sleep, LONGEST_SLEEP_SECONDS)
            if any(lane.has_news() for lane in polled):
                return
            if self._advance is not None and self._advance():
                return

    def _is_short(self, polled: list[Lane]) -> bool:
        """Whether it has not waited for long; leaves the core to others if they want it."""
        now = time.perf_counter()
        if not self._began:
            self._began, self._limit = now, max(_YIELD_SECONDS, _PATIENCE * _predicted(polled))
        if now - self._began > _SPIN_SECONDS:
            os.sched_yield()
        return now - self._began < self._limit


def _predicted(lanes: Sequence[Lane]) -> float:
    """How long what is in flight takes by itself, in seconds."""
    flights = (item for lane in lanes for item in lane.items[lane.done : lane.started])
    return sum(item.tasks[0].seconds for item in flights)
