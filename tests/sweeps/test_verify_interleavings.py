"""Plans of several stages are judged as trying every interleaving judges them."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from mutants import with_program, with_register
from oracle import Fault
from pipeline_jobs import Case, layers, plan_of
from random_stages import edits, random_stages
from stage_oracle import explore_stages

from mpiflow.errors import VerifyError
from mpiflow.plan.verify import verify


def judged(plan, **more):
    """Whether any interleaving hangs, or reads what is not there."""
    try:
        explore_stages(plan, "train", **more)
    except Fault:
        return "wrong"
    return "right"


def verified(plan):
    try:
        verify(plan)
    except VerifyError:
        return "rejected"
    return "accepted"


@pytest.mark.parametrize("seeds", [range(i, i + 40) for i in (0, 40)], ids=str)
def test_what_any_interleaving_shows_to_be_wrong_is_rejected_and_no_valid_plan_is(seeds):
    found = Counter()
    for seed in seeds:
        plan, draw = random_stages(seed), random.Random(seed)
        assert (judged(plan), verified(plan)) == ("right", "accepted"), seed
        for edited in (edits(plan, draw) for _ in range(3)):
            found[judged(edited), verified(edited)] += 1
    assert not found["wrong", "accepted"]
    assert found["wrong", "rejected"] > 30
    assert found["right", "accepted"] > 10  # harmless edits do not hinder


def test_the_interleavings_that_are_left_out_would_show_nothing_else():
    verdicts = Counter()
    for seed in range(12):
        plan, draw = random_stages(seed), random.Random(seed)
        if sum(len(p.tasks) * p.micro_batches for p in plan.programs) < 40:
            for edited in (edits(plan, draw) for _ in range(3)):
                verdict = judged(edited)
                assert verdict == judged(edited, reduced=False)
                verdicts[verdict] += 1
    assert min(verdicts.values()) > 3


def test_a_compiled_pipeline_is_right_by_every_interleaving():
    plan = plan_of(Case(layers, "stage=2", 6, "zero-bubble"))
    assert judged(plan) == "right"
    assert explore_stages(plan, "train") > 100


def test_too_much_in_flight_in_a_late_micro_batch_is_refused():
    """Not only the first micro-batches are looked at: a sequence need not go on as it began."""
    plan = random_stages(0, shapes=[(2, 9)])
    program, top = plan.program("train"), dict(plan.arenas)["host.0"]
    early = tuple(turn for k in range(1, 6) for turn in ((0, k), (1, k - 1)))
    late = ((0, 6), (0, 7), (1, 5), (0, 8), (1, 6), (1, 7), (1, 8))
    changed = with_register(program, "x", slots=9, offset=top)
    assert {r.slots for r in changed.registers if r.name == "h"} == {2}
    changed = replace(changed, sequence=((0, 0), *early, *late))
    arenas = tuple((name, size + 36) for name, size in plan.arenas)
    edited = replace(with_program(plan, program, changed), arenas=arenas)
    assert judged(edited) == "wrong"
    with pytest.raises(VerifyError, match=r"write register h of micro-batch 9 while .* still uses"):
        verify(edited)
