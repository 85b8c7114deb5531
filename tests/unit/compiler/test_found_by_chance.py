"""Jobs that random search has found to have no plan, or one that the verifier refused."""

import pytest
from pipeline_jobs import Case, branches, layers, plan_of

CASES = {
    # A message that begins a turn of the loop worked in memory that held a sum of all turns.
    "a workspace between two turns": Case(
        layers, "data=3,model=2", 12, "1f1b", zero=2, optimizer="sgd", forced=836, recompute="full"
    ),
    # Of one sum over stages, a stage had whole scalars and partial ones, and sent both as one.
    "whole and partial scalars of a norm": Case(
        layers, "stage=3,model=2", 6, "interleaved", 2, zero=3, optimizer="adam", forced=874,
        recompute="selective",
    ),
    # Two sums of a stage, fused into one, were sent to another, and so had several slots.
    "a bucket that leaves the stage": Case(
        branches, "stage=2,data=3", 2, "1f1b", zero=1, optimizer="sgd", forced=553
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_made_and_proven(name):
    plan_of(CASES[name])
