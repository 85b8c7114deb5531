"""The search finds what planning everything finds, and says why it is not something else."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from jobs import ROWS, classifier, data_set

import mpiflow as mf
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.candidates import Candidate, Space
from mpiflow.compiler.driver import compile_job, training_graph
from mpiflow.compiler.estimate import Estimate, Estimator
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD, Pipeline
from mpiflow.compiler.search import search
from mpiflow.errors import CompileError
from mpiflow.graph.mesh import parse_mesh

BATCH, LIMIT, MOST = 8, 80_000, 5
JOB = replace(
    classifier(BATCH, width=300, hidden=None, last=None, optimizer=mf.Adam(lr=0.01)), evaluate=None
)
DATA = {"train": data_set("train", ROWS, BATCH)}
MACHINE = find_machine("cpu")
DEFAULT = Candidate(parse_mesh("data=4"), 1, auto=True)
SPACE = Space(4, BATCH, layers=2, devices=1, pipeline=ONE_FORWARD_ONE_BACKWARD)
ALL = [DEFAULT, *SPACE.candidates()]


@cache
def planned(candidate, limit=LIMIT):
    """As `mpiflow.search` plans it."""
    job = replace(JOB, micro_batches=candidate.micro_batches)
    target = Target(
        candidate.mesh,
        MACHINE,
        zero=candidate.zero,
        memory=limit if candidate.auto else 0,
        pipeline=candidate.pipeline,
        recompute=candidate.recompute,
    )
    return compile_job(job, DATA, target)


@cache
def estimator(limit=LIMIT):
    graph = training_graph(JOB, DATA, Target(DEFAULT.mesh, MACHINE), Path())
    return Estimator(graph, MACHINE, limit)


def seconds(plan):
    return plan.program("train").seconds


def searched(candidates=None, most=MOST, limit=LIMIT, plan=planned):
    return search(candidates or ALL, estimator(limit), plan, limit=limit, most=most)


def test_under_a_tight_limit_it_finds_in_a_few_plans_what_planning_everything_finds():
    plans = [planned(candidate) for candidate in ALL]
    fitting = [plan for plan in plans if dict(plan.arenas)["host"] <= LIMIT]
    assert MOST < len(fitting) < len(plans)
    found = searched()
    assert len(found.planned) + len(found.failed) <= MOST
    assert found.planned[0].seconds == min(map(seconds, fitting))
    assert found.planned[0].nbytes <= LIMIT < dict(planned(DEFAULT, 0).arenas)["host"]


def test_each_candidate_is_accounted_for_once():
    found = searched()
    named = [p.candidate for p in found.planned]
    for group in (found.failed, found.uncut, found.large):
        named += [candidate for candidate, _ in group]
    named += [*found.needless, *found.slower]
    # Without the one that is the default by another name.
    assert len(named) == len(set(named)) == found.tried == len(ALL) - 1
    assert [p.seconds for p in found.planned] == sorted(p.seconds for p in found.planned)


def test_it_is_never_worse_than_what_is_had_without_it():
    for most in (1, 2):
        found = searched(most=most)
        assert DEFAULT in [p.candidate for p in found.planned]
        assert found.planned[0].seconds <= seconds(planned(DEFAULT))


def test_it_gives_the_same_again():
    calls = []
    for _ in range(2):
        calls.append([])
        searched(plan=lambda candidate: calls[-1].append(candidate) or planned(candidate))
    assert calls[0] == calls[1]


def test_what_saves_memory_is_not_planned_where_there_is_enough():
    found = searched(limit=0)
    assert found.needless
    for candidate in found.needless:
        assert (candidate.zero or 0) > 1 or candidate.micro_batches > 1 or candidate.recompute
    assert not found.large


def test_where_nothing_fits_the_reason_is_that_of_the_default():
    limit = 20_000
    with pytest.raises(CompileError, match=r"does not fit 19\.5 KiB a rank on mesh data=4"):
        search(
            [DEFAULT, replace(DEFAULT, zero=1)],
            estimator(limit),
            lambda candidate: planned(candidate, limit),
            limit=limit,
        )


def test_a_plan_that_fails_is_a_reason_and_no_end():
    broken = replace(DEFAULT, zero=1)

    def plan(candidate):
        if candidate == broken:
            raise CompileError("planted: no such plan\n  more of it")
        return planned(candidate)

    found = searched([DEFAULT, broken], plan=plan)
    assert found.failed == ((broken, "planted: no such plan"),)
    assert [p.candidate for p in found.planned] == [DEFAULT]


def test_what_cannot_be_cut_is_not_planned():
    deep = Candidate(parse_mesh("stage=64"), 1)
    found = searched([DEFAULT, deep])
    ((candidate, why),) = found.uncut
    assert candidate == deep
    assert "cannot be cut into 64 pieces" in why


def test_plans_correct_the_estimates_of_their_mesh():
    """Estimates that are wrong for a mesh mislead once."""
    wrong = parse_mesh("stage=2,data=2")
    tried = []

    def estimate(candidate):
        return Estimate(1e-4 if candidate.mesh == wrong else 1.5e-4, 0.0)

    def plan(candidate):
        tried.append(candidate.mesh)
        return planned(candidate, 0)

    search(ALL, estimate, plan, most=3)
    assert tried.count(wrong) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mesh": parse_mesh("stage=2,model=2")}, lambda c: str(c.mesh) == "stage=2,model=2"),
        ({"micro_batches": 2}, lambda c: c.micro_batches == 2),
        ({"zero": 2}, lambda c: c.zero == 2),
        ({"pipeline": Pipeline("zero-bubble")}, lambda c: c.pipeline.schedule == "zero-bubble"),
        ({"recompute": "full"}, lambda c: c.recompute == "full"),
        ({"zero": 0, "recompute": "none"}, lambda c: (c.zero, c.recompute) == (0, "none")),
    ],
)
def test_what_is_given_stays(given, expected):
    space = Space(4, BATCH, 2, 4, recomputable=True)
    candidates = replace(space, **given).candidates()
    assert candidates
    assert all(map(expected, candidates))
    assert len(candidates) == len(set(candidates)) < len(space.candidates())


def test_the_space_keeps_the_limits_of_model_machine_and_batch():
    candidates = Space(64, 96, layers=12, devices=8).candidates()
    for candidate in candidates:
        axes, pipeline = dict(candidate.mesh.axes), candidate.pipeline
        stages = axes.get("stage", 1)
        assert candidate.mesh.size == 64
        assert axes.get("model", 1) <= 8
        assert stages * pipeline.virtual <= 12
        assert 96 % candidate.micro_batches == 0
        assert candidate.micro_batches <= 8 * stages
        pipeline.check(candidate.mesh, candidate.micro_batches)
    assert {c.mesh.stages for c in candidates} == {1, 2, 4, 8}
    assert {c.pipeline.schedule for c in candidates} == {"1f1b", "zero-bubble", "interleaved"}


def test_estimates_are_near_the_plans():
    for candidate in (DEFAULT, Candidate(parse_mesh("stage=2,data=2"), 4)):
        known, plan = estimator(0)(candidate), planned(candidate, 0)
        assert known.seconds == pytest.approx(seconds(plan), rel=0.5)
        assert known.nbytes == pytest.approx(dict(plan.arenas)["host"], rel=0.5)
