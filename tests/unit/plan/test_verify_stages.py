"""Plans whose stages do not fit together are refused, in words that name where."""

from dataclasses import replace

import pytest
from pipeline_jobs import Case, branches, layers, plan_of, tied
from stage_mutants import MUTATIONS, stage_mutants

from mpiflow.errors import VerifyError
from mpiflow.plan.records import RECEIVE, SEND
from mpiflow.plan.store import dumps, loads
from mpiflow.plan.verify import verify

CASES = [
    Case(branches, "stage=3,data=2", 4),
    Case(layers, "stage=2", 6, "zero-bubble"),
    Case(tied, "stage=2,data=2", 1),
    Case(branches, "stage=2", 4, "interleaved", 2),
]


def test_mutants_are_refused_and_named():
    found = [mutant for case in CASES for mutant in stage_mutants(plan_of(case), 1)]
    assert {mutant.kind for mutant in found} == set(MUTATIONS)
    wrong = []
    for mutant in found:
        try:
            verify(mutant.plan)
        except VerifyError as error:
            text = str(error)
            if len(text) > 1500 or not any(name in text for name in mutant.names):
                wrong.append(f"{mutant.kind} {mutant.what}: unclear: {text}")
        else:
            wrong.append(f"{mutant.kind} {mutant.what}: accepted")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def plan():
    return plan_of(CASES[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a[:-1], "the plan has 3 stages and the arenas host, host.0, host.1; it needs"),
        (lambda a: (("host", a[0][1] + 8), *a[1:]), "not as large as that of the largest stage"),
    ],
)
def test_every_stage_has_an_arena_and_the_first_is_the_largest(plan, change, says):
    with pytest.raises(VerifyError, match=says):
        verify(replace(plan, arenas=change(plan.arenas)))


@pytest.mark.parametrize("stages", [4, 10**18])
def test_more_stages_than_there_are_arenas_are_refused(plan, stages):
    axes = tuple((name, stages if name == "stage" else size) for name, size in plan.mesh.axes)
    with pytest.raises(VerifyError, match=f"the plan has {stages} stages and the arenas host, "):
        verify(replace(plan, mesh=replace(plan.mesh, axes=axes)))


def test_what_several_stages_keep_is_alike(plan):
    first, *others = [v for v in plan.variables if v.name == "gain"]
    assert others
    variables = tuple(replace(v, trainable=False) if v is first else v for v in plan.variables)
    with pytest.raises(VerifyError, match=r"variable gain is .* on stage 0 and .* on stage"):
        verify(replace(plan, variables=variables))


@pytest.fixture(scope="module")
def unequal():
    return plan_of(Case(tied, "stage=2,data=2+1,model=1+2", 2))


def test_a_plan_of_unequal_stages_is_proven_and_comes_back_from_its_file(unequal):
    verify(unequal)
    assert loads(dumps(unequal)) == unequal


def with_task(plan, kind, change, stage=0):
    """The plan with the first task of a kind that a stage has in training changed."""
    programs = []
    for program in plan.programs:
        tasks = list(program.tasks)
        if (program.name, program.stage) == ("train", stage):
            i = next(i for i, task in enumerate(tasks) if task.kind == kind)
            tasks[i] = change(tasks[i])
        programs.append(replace(program, tasks=tuple(tasks)))
    return replace(plan, programs=tuple(programs))


def with_attribute(name, value):
    return lambda task: replace(task, attributes={**task.attributes, name: value})


def without_ends(task):
    kept = {name: task.attributes[name] for name in ("stage", "message")}
    return replace(task, attributes=kept)


@pytest.mark.parametrize("kind", [SEND, RECEIVE])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_attribute("mesh", "data=2,model=2"), "on mesh data=2,model=2, which is"),
        (with_attribute("mesh", "data=1,model=1"), "on mesh data=1,model=1, which is"),
        (with_attribute("layout", "B B S(1)"), "as B B S\\(1\\) on mesh"),
        (without_ends, "as None on mesh None"),
        (lambda task: replace(task, nbytes=task.nbytes + 8), "bytes"),
        (with_attribute("stage", 0), "stage 0"),
        (with_attribute("message", 99), "message (0|99)"),
    ],
)
def test_a_wrong_end_piece_or_count_is_refused(unequal, kind, change, says):
    with pytest.raises(VerifyError, match=says):
        verify(with_task(unequal, kind, change))


def test_between_equal_stages_no_pieces_are_named(plan):
    with pytest.raises(VerifyError, match=r"takes stage 1 to hold .* as B on mesh data=2, which"):
        verify(with_task(plan, SEND, lambda task: replace(
            task, attributes={**task.attributes, "mesh": "data=2", "layout": "B"}
        )))  # fmt: skip
