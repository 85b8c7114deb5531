"""Where a rank is in its plan, as few numbers as other ranks need to know whom it waits for.

    streams of a step   read: x    compute: f, g, h    comm: a
    after kernel f      {read: 1, compute: 1, comm: 0}: g is at the head of `compute`, a of `comm`

All ranks run the same programs in the same order, and every stream its tasks in the order of the
plan; so that two positions can be compared, and the plan says what stands at the head of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """The `run`-th program that a rank runs, and by stream how many of its tasks are done.

    `program` is empty between two programs. `computing` is whether a kernel runs, rather than the
    rank waiting for one of its streams. `seconds` are predicted, for the task in hand.
    """

    run: int = 0
    program: str = ""
    step: int = 0
    done: tuple[tuple[str, int], ...] = ()
    computing: bool = False
    seconds: float = 0.0

    def head(self, stream: str) -> int:
        """The number of the first task of a stream that is not done."""
        return dict(self.done).get(stream, 0)

    @property
    def name(self) -> str:
        """`step 17`, or `evaluate, step 2`; empty between two programs."""
        step = f"step {self.step + 1}"
        return step if self.program == "train" else self.program and f"{self.program}, {step}"


NOWHERE = Position()
"""Before the first program."""
