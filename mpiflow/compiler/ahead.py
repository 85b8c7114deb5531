"""How many micro-batches the stages of 1F1B begin before the first comes back.

As many as there are stages behind, and itself, keep a stage busy if messages take no time and all
stages as long. Otherwise what comes back comes later, by two messages for each stage behind say;
with up to as many more in flight as there are stages behind, a stage need not stand still for that.
How many is found by letting the stages take their turns on a clock, with the predicted seconds of
kernels and messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cache

from mpiflow.compiler.parts import Step
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD, Pipeline, Sequence

_WORTH = 0.01
"""The share of a step that is not worth the memory of more micro-batches."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Predicted seconds of each stage for one micro-batch: forward, backward; and of messages.

    `there` are those to the next stage, `back` those that come back from it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    there: tuple[float, ...]
    back: tuple[float, ...]

    def seconds(self, sequences: Rows[Sequence]) -> float:
        """When all stages are done, if each takes its turns as soon as what it needs is there."""
        done: dict[tuple[int, int, int], float] = {}
        now, left = [0.0] * len(sequences), [deque(sequence) for sequence in sequences]
        stage = idle = 0
        while idle < len(left):
            idle += 1
            while left[stage]:
                segment, micro = left[stage][0]
                came = self._came(stage, segment, micro, done)
                if came is None:
                    break
                spent = self.backward[stage] if segment else self.forward[stage]
                now[stage] = max(now[stage], came) + spent
                done[stage, segment, micro] = now[stage]
                left[stage].popleft()
                idle = 0
            stage = (stage + 1) % len(left)
        assert not any(left), "stages wait in a circle"
        return max(now)

    def _came(
        self, stage: int, segment: int, micro: int, done: dict[tuple[int, int, int], float]
    ) -> float | None:
        """When what a segment needs has come, None if that is not known yet."""
        if not segment and not stage:
            return 0.0
        if not segment:
            source, way = (stage - 1, 0, micro), self.there[stage - 1]
        elif stage == len(self.forward) - 1:
            source, way = (stage, 0, micro), 0.0
        else:
            source, way = (stage + 1, 1, micro), self.back[stage]
        return done[source] + way if source in done else None


def hurried(step: Step) -> Step:
    """A training step under 1F1B with as many more micro-batches in flight as are worth it."""
    if step.stages is None or step.timing is None or step.pipeline != ONE_FORWARD_ONE_BACKWARD:
        return step
    count = step.timing.micro_batches
    return step.with_ahead(fewest_ahead(_turns(step, step.stages.stages, count), count))


def fewest_ahead(turns: Turns, count: int) -> int:
    """The fewest more of `count` micro-batches with which stages take hardly longer than at best.

    That is _WORTH longer, at most, than with the most in flight.
    """
    stages = len(turns.forward)

    @cache
    def seconds(ahead: int) -> float:
        pipeline = Pipeline(ahead=ahead)
        return turns.seconds([pipeline.sequence(stage, stages, count) for stage in range(stages)])

    most = min(stages, count) - 1
    enough = (1 + _WORTH) * seconds(most)
    return bisect_left(range(most), True, key=lambda ahead: seconds(ahead) <= enough)


def _turns(step: Step, stages: int, count: int) -> Turns:
    forward, backward, there, back = ([0.0] * stages for _ in range(4))
    for stage in range(stages):
        kernels = step.layouts[stage].kernel_seconds()
        for node, segment in step.segments(stage).items():
            if step.timing and step.timing.loops[node]:
                (backward if segment else forward)[stage] += kernels[node] / count
    for message in step.messages:
        if message.loop and message.target == message.source + 1:
            there[message.source] += message.seconds
        elif message.loop and message.source == message.target + 1:
            back[message.target] += message.seconds
    return Turns(tuple(forward), tuple(backward), tuple(there), tuple(back))
