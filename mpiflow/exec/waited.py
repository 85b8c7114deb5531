"""Waited: whether all that the plan lets an item wait for is done, looked at when it starts.

`exec.hazards` goes by what items wait for; here the engine and the device are held to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpiflow.exec.feed import FeedLane
from mpiflow.exec.lanes import DeviceLane, Finding, Lane
from mpiflow.plan.unroll import folded

Lanes = Mapping[str, Lane]
"""Those of the step under way, by stream."""


def check_host(lane: Lane, number: int, lanes: Lanes) -> None:
    """Finding where the host starts an item before it has seen that all before it is done.

    Between two streams of the device an event is enough, of what has been submitted.
    """
    for other, count in _before(lane, number, lanes):
        by_event = isinstance(lane, DeviceLane) and isinstance(other, DeviceLane)
        if (other.started if by_event else other.done) < count:
            raise Finding(_too_early(other, count), lane.items[number].tasks[0])


def check_device(lane: DeviceLane, number: int, lanes: Callable[[], Lanes]) -> None:
    """Finding where the device comes to an item that it was not given all events for.

    Copies of what is read may come in either of two steps, and only the host is held to those.
    """
    if isinstance(lane, FeedLane):
        return
    for other, count in _before(lane, number, lanes()):
        if isinstance(other, DeviceLane) and other.reached() < count:
            raise Finding(_too_early(other, count), lane.items[number].tasks[0])


def _before(lane: Lane, number: int, lanes: Lanes) -> list[tuple[Lane, int]]:
    """Other lanes that an item has to wait for, and how many items of each."""
    item = lane.items[number]
    early = isinstance(lane, FeedLane) and lane.early
    waits = (item.early or ()) if early else item.waits
    return [(lanes[stream], count) for stream, count in waits if stream != lane.stream]


def _too_early(lane: Lane, count: int) -> str:
    return f"starts before {folded(lane.items[count - 1].tasks[-1])} on {lane.stream} is done"
