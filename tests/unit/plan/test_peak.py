"""What arenas hold when fullest: classes add up, and slots in flight count one by one."""

from dataclasses import replace

import pytest
from jobs import classifier, compile_for

import mpiflow as mf
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.plan.memory import figures, memory_report, show_memory
from mpiflow.plan.peak import peak


def planned(mesh, micro_batches, schedule="1f1b", virtual=1, **more):
    job = classifier(256, hidden="B", optimizer=mf.Adam(lr=0.01))
    job = replace(job, micro_batches=micro_batches, **more)
    return compile_for(mesh, job, pipeline=Pipeline(schedule, virtual))


CASES = [
    ("data=2", 1, "1f1b", 1),
    ("data=3", 4, "1f1b", 1),
    ("stage=2", 1, "1f1b", 1),
    ("stage=3,data=2", 8, "1f1b", 1),
    ("stage=2,data=2", 8, "gpipe", 1),
    ("stage=2", 4, "interleaved", 2),
    ("stage=3", 8, "zero-bubble", 1),
]


@pytest.mark.parametrize(("mesh", "micro_batches", "schedule", "virtual"), CASES)
def test_classes_add_up_and_nothing_alive_shares_a_byte(mesh, micro_batches, schedule, virtual):
    plan = planned(mesh, micro_batches, schedule, virtual)
    for stage in plan.stages():
        at, (_, arena) = peak(stage), stage.arenas[0]
        held = dict(at.classes)
        assert sum(held.values()) == arena
        assert held.pop("unused then") >= 0
        # If two of them lay in one place, or one were counted twice, these would differ.
        assert sum(tensor.nbytes for tensor in at.tensors) == sum(held.values())


def test_a_stage_holds_the_activations_of_micro_batches_in_flight():
    found = {
        schedule: [
            max(t.times for t in peak(stage).tensors if t.kind == "activations")
            for stage in planned("stage=3", 8, schedule, evaluate=None).stages()
        ]
        for schedule in ("1f1b", "gpipe")
    }
    # Messages take so long here that twice the stages behind are in flight. What a stage receives
    # has a slot more, as the next comes meanwhile.
    assert found["1f1b"] == [2 * 3 - 1, 2 * 2 - 1, 1 + 1]
    assert min(found["gpipe"]) > 4
    assert found["gpipe"][0] == 8


def test_a_tensor_is_named_once_with_its_slots_and_the_line_of_the_user():
    at = peak(planned("stage=2", 4, "gpipe").at_stage(0))
    names = [tensor.name for tensor in at.tensors]
    assert not [name for name in names if "#" in name]
    assert len(names) == len(set(names))
    weight = next(t for t in at.tensors if t.name == "fc1.weight")
    assert (weight.kind, weight.times) == ("variables", 1)
    assert "jobs.py:" in weight.where
    assert [t.nbytes for t in at.tensors] == sorted((t.nbytes for t in at.tensors), reverse=True)


def test_the_report_has_a_line_for_each_stage_and_the_largest_tensors():
    plan = planned("stage=2,data=2", 4)
    table, report = show_memory(plan), memory_report(plan)
    _, heads, *rows = table.splitlines()
    assert heads.split()[:3] == ["stage", "arena", "variables"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert table in report
    for stage in range(2):
        assert f"stage {stage}: fullest in " in report
    assert "jobs.py:" in report


def test_figures_are_those_of_the_arenas():
    plan = planned("stage=2", 4)
    found = figures(plan)
    assert [one["arena_bytes"] for one in found] == [n for _, n in plan.arenas[1:]]
    for one in found:
        assert sum(one["classes"].values()) == one["arena_bytes"]
        assert one["largest"][0]["bytes"] >= one["largest"][-1]["bytes"]
