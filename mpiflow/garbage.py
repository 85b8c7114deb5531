"""Work that makes no garbage in cycles need not be stopped to look for some."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the search for cycles, which goes through all that is kept again and again.

    What nothing refers to is freed as always. Plans are very many small records: choosing layouts
    took a quarter of its time looking at them, proving and simulating an eighth.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
