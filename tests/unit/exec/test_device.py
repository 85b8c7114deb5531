"""The CPU as a device."""

import numpy as np
import pytest

from mpiflow.errors import PlanError
from mpiflow.exec.arena import Arena
from mpiflow.exec.device import Cpu


def test_memory_is_zeroed_and_begins_at_a_cache_line():
    for nbytes in (0, 1, 1000):
        memory = Cpu().allocate(nbytes)
        assert memory.shape == (nbytes,)
        assert not memory.any()
        assert nbytes == 0 or memory.ctypes.data % 64 == 0


def test_an_arena_larger_than_the_machine_says_how_large():
    with pytest.raises(PlanError, match="arena of 1152921504606846976 bytes"):
        Arena(Cpu(), 1 << 60)


def test_the_peak_is_how_far_views_reach():
    arena = Arena(Cpu(), 100)
    arena.view(8, (3, 2), "float32")
    arena.scratch(0, 4)
    assert arena.peak == 32


def test_kernels_overflow_in_silence():
    with Cpu().quiet():
        assert np.exp(np.float32(1000)) == np.inf
