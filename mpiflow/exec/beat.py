"""What a rank tells the others of itself, a few times a second."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from mpiflow.exec.position import NOWHERE, Position


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank was when it sent its `number`-th beat, and for how long it had been there.

    `entered`, `waiting` are those of its transport. `reading` and `writing` say what its threads
    do with files; `saving` is whether the rank waits for the latter. `still` are seconds, `deaf`
    those for which it has not looked whether what it waits for has come. `stack` is where the
    rank's Python code stands, if it has been still for some time. Between two programs `line` is
    that place now, unless the rank waits: nothing else tells whether it gets on.
    """

    rank: int
    number: int
    position: Position = NOWHERE
    entered: int = 0
    waiting: bool = False
    reading: str = ""
    writing: str = ""
    saving: bool = False
    still: float = 0.0
    stack: str = ""
    deaf: float = 0.0
    line: str = ""

    def place(self) -> tuple[Any, ...]:
        """What changes whenever the rank gets on with anything."""
        at = self.position, self.line
        return *at, self.entered, self.waiting, self.reading, self.writing, self.saving

    def pack(self) -> bytes:
        """As bytes, for `unpack`."""
        return json.dumps(asdict(self)).encode()


def unpack(data: bytes) -> Beat | None:
    """The beat that `pack` made; None for anything else, as any program can send to a port."""
    try:
        plain = json.loads(data)
        position = plain.pop("position")
        done = tuple((str(stream), int(number)) for stream, number in position.pop("done"))
        beat = Beat(**plain, position=Position(**position, done=done))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return beat if isinstance(beat.rank, int) and isinstance(beat.still, float) else None
