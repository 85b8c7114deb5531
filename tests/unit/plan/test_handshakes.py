"""What streams wait for: everything that the plan needs, and no more handshakes than that."""

from dataclasses import replace

import pytest
from jobs import classifier, classifier_plan, compile_for
from micro_jobs import masked_plan
from pipeline_jobs import Case, layers, plan_of

from mpiflow.plan.handshakes import items_of
from mpiflow.plan.places import FEED, NCCL
from mpiflow.plan.records import COMPUTE, READ, WRITE
from mpiflow.plan.unroll import unroll


def unrolled(plan, name="train", stage=0):
    plan = plan.at_stage(stage)
    program = unroll(plan.program(name))
    return program, {**plan.tensors(program), **{r.name: r for r in program.registers}}


PLANS = {
    "ranks": lambda: unrolled(classifier_plan("data=2")),
    "mesh": lambda: unrolled(classifier_plan("data=2,model=2")),
    "micro": lambda: unrolled(masked_plan("data=2")),
    "first stage": lambda: unrolled(plan_of(Case(layers, "stage=2,data=2", 4))),
    "last stage": lambda: unrolled(plan_of(Case(layers, "stage=2,data=2", 4)), stage=1),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_need_is_waited_for_by_the_item_or_one_before_it(name):
    program, tensors = PLANS[name]()
    items = items_of(program, tensors)
    place = {
        task.name: (stream, number, rank)
        for stream, row in items.items()
        for number, item in enumerate(row)
        for rank, task in enumerate(item.tasks)
    }
    for stream, row in items.items():
        reached = {}
        for number, item in enumerate(row):
            reached |= {s: max(n, reached.get(s, 0)) for s, n in item.waits}
            for rank, task in enumerate(item.tasks):
                for need in program.needs()[task.name]:
                    other, at, before = place[need]
                    if other != stream or stream != COMPUTE:
                        assert reached.get(other, 0) > at, f"{task.name} needs {need}"
                    else:
                        assert (at, before) < (number, rank)


@pytest.mark.parametrize("name", PLANS)
def test_segments_end_only_where_somebody_waits(name):
    program, tensors = PLANS[name]()
    items = items_of(program, tensors)
    awaited = {n for row in items.values() for item in row for s, n in item.waits if s == COMPUTE}
    segments = items[COMPUTE]
    for number, item in enumerate(segments):
        last = number + 1 == len(segments)
        assert item.awaited == (number + 1 in awaited or last)
        assert item.awaited or segments[number + 1].waits
    listed = [task for item in segments for task in item.tasks]
    assert listed == [program.tasks[i] for i in dict(program.order)[COMPUTE]]


def test_a_program_on_one_rank_waits_for_what_is_read_and_nothing_else():
    items = items_of(*unrolled(classifier_plan("data=1")))
    assert items.keys() == {COMPUTE, READ}
    assert [item.waits for item in items[COMPUTE]] == [(), ((READ, 1),)]
    assert WRITE not in items_of(*unrolled(classifier_plan("data=1"), "save"))


def test_messages_of_a_stream_that_use_the_same_memory_do_not_overlap():
    program, tensors = unrolled(classifier_plan("data=2,model=2"))
    stream, (first, second) = next(
        (stream, order[:2]) for stream, order in program.order
        if stream.startswith("comm") and len(order) > 1
    )  # fmt: skip
    (after,) = [
        i for i in items_of(program, tensors)[stream] if i.tasks[0] is program.tasks[second]
    ]
    assert dict(after.waits).get(stream, 0) == 0
    shared = tensors[program.tasks[first].inputs[0]].offset
    names = program.tasks[second].inputs
    moved = {name: replace(tensors[name], offset=shared) for name in names}
    (after,) = [
        i for i in items_of(program, {**tensors, **moved})[stream]
        if i.tasks[0] is program.tasks[second]
    ]  # fmt: skip
    assert dict(after.waits)[stream] == 1


def test_a_copy_of_what_is_read_begins_in_the_step_before_when_its_slot_is_free_there():
    """With three micro-batches in two slots the third one waits for the first of its own step."""
    plan = compile_for("data=2", replace(classifier(48), micro_batches=3), route=NCCL)
    program, tensors = unrolled(plan)
    items = items_of(program, tensors)
    assert [item.early is None for item in items[FEED]] == [False, False, True]
    taken = {r.name.partition("#")[0] for r in program.registers if r.slots == 2} - {""}
    for number, item in enumerate(items[FEED][:2]):
        ((stream, count),) = item.early
        done = [task for each in items[stream][:count] for task in each.tasks]
        users = [t for t in program.tasks if {f"{n}#{number + 1}" for n in taken} & {*t.inputs}]
        assert {t.name for t in users if t.stream == COMPUTE} <= {t.name for t in done}
    alone = items_of(*unrolled(compile_for("data=2", classifier(48), route=NCCL)))
    assert [item.early for item in alone[FEED]] == [()]
