from dataclasses import replace

import handmade
import pytest
from micro_jobs import masked_plan
from mutants import swapped, with_program, with_register, with_task

from mpiflow.graph.mesh import parse_mesh
from mpiflow.plan.diff import diff
from mpiflow.plan.records import Layouts

PLAN = handmade.dense()
TRAIN = PLAN.program("train")


def train(change, *arguments, **changes):
    return with_program(PLAN, TRAIN, change(TRAIN, *arguments, **changes))


def test_a_plan_does_not_differ_from_itself():
    assert diff(PLAN, handmade.dense()) == []


CASES = [
    (replace(PLAN, mesh=parse_mesh("data=3")), ["mesh: data=2 -> data=3"]),
    (replace(PLAN, seed=7), ["seed: 0 -> 7"]),
    (replace(PLAN, settings=replace(PLAN.settings, epochs=3)), ["settings epochs: 2 -> 3"]),
    (replace(PLAN, layouts=Layouts(gap=0.01)), ["layouts gap: 0.0 -> 0.01"]),
    (replace(PLAN, identity=PLAN.identity[:2]), ["program batch: 5 -> gone"]),
    (replace(PLAN, data=(replace(PLAN.data[0], seed=4),)), ["data train seed: 0 -> 4"]),
    (replace(PLAN, arenas=(("host", 2048),)),
     ["memory arena host: 544 bytes (544 B) -> 2048 bytes (2.00 KiB)"]),
    (replace(PLAN, variables=PLAN.variables[:1]),
     ["variable b: float32 (4,) B, 16 bytes -> gone"]),
    (replace(PLAN, notes=()), ["note only in the first: the last 2 rows of an epoch are left out"]),
    (replace(PLAN, programs=PLAN.programs[:2]), ["save: gone"]),
    (with_program(PLAN, TRAIN, replace(TRAIN, seconds=0.02)),
     ["train: predicted step: 0.01 s (10.0 ms) -> 0.02 s (20.0 ms)"]),
    (train(with_task, 7, nbytes=8),
     ["train: all_reduce of l: along data, float32 () P -> B, 4 bytes -> "
      "along data, float32 () P -> B, 8 bytes"]),
    (train(with_task, 1, op="add"),
     ["train: tasks matmul: 2 -> 1", "train: tasks add: new, 1"]),
    (train(with_register, "norm", offset=280), ["only places in memory, names or order differ"]),
    (train(swapped, 4, 5), ["only places in memory, names or order differ"]),
]  # fmt: skip


@pytest.mark.parametrize(("other", "lines"), CASES)
def test_each_difference_is_one_line_with_both_values(other, lines):
    if other.mesh == PLAN.mesh:
        assert diff(PLAN, other) == lines
    assert set(lines) <= set(diff(PLAN, other))
    assert diff(other, PLAN) != []


def test_two_unlike_plans_are_compared_collective_by_collective():
    lines = diff(PLAN, handmade.sharded())
    assert "train: bytes sent by a rank: 84 (84 B) -> 188 (188 B)" in lines
    assert any(line.startswith("train: all_gather of v: new, along model") for line in lines)


def test_the_number_of_micro_batches_is_told():
    whole, cut = (masked_plan("data=2", micro_batches=n) for n in (1, 4))
    assert "train: micro-batches: 1 -> 4" in diff(whole, cut)
