"""Faults that only a step of micro-batches can have, planted in a plan of two loops."""

from dataclasses import replace

import pytest
from micro_jobs import masked_plan, with_train
from mutants import MUTATIONS, mutants, swapped, with_register, with_task

from mpiflow.errors import MpiflowError, VerifyError
from mpiflow.graph.sbp import B, P, S
from mpiflow.plan.records import Task
from mpiflow.plan.verify import verify

MESHES = ("data=2", "data=2,model=2")


def plan_of(mesh="data=2"):
    return masked_plan(mesh)


def train(mesh="data=2"):
    return plan_of(mesh).program("train")


def place(name_or_test, program=None):
    """The index of a task, by its name or the first that passes a test."""
    tasks = (program or train()).tasks
    passes = name_or_test if callable(name_or_test) else lambda t: t.name == name_or_test
    return next(i for i, t in enumerate(tasks) if passes(t))


def rejection(change, **changes):
    with pytest.raises(VerifyError) as caught:
        verify(with_train(plan_of(), change, **changes))
    return str(caught.value)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_plan_itself_is_accepted_and_has_two_loops(mesh):
    verify(plan_of(mesh))
    assert {t.phase for t in train(mesh).tasks} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("count", [0, -4, 5, 48])
def test_micro_batches_that_do_not_divide_the_rows_are_refused(count):
    assert f"has {count} micro-batches, which do not divide its 24 rows" in rejection(
        None, micro_batches=count
    )


@pytest.mark.parametrize(("count", "loops"), [(10**6, True), (10**18, True), (10**18, False)])
def test_too_many_micro_batches_are_refused_before_they_are_written_out(count, loops):
    def grown(program):
        tasks = program.tasks if loops else tuple(replace(t, phase=0) for t in program.tasks)
        return replace(program, rows=count, micro_batches=count, tasks=tasks)

    assert f"of {count} micro-batches; a step may have 8388608 firings" in rejection(grown)


def test_a_task_of_a_single_micro_batch_is_refused():
    assert "is of micro-batch 2; a plan lists what all of them do" in rejection(
        lambda p: with_task(p, place("out/linear"), micro=2)
    )
    assert "out/linear is of micro-batch 1" in rejection(
        lambda p: with_register(p, "out/linear", micro=1)
    )


def test_names_that_a_firing_will_have_are_refused():
    early = next(t.name for t in train().tasks if t.phase == 1 and t.op == "Accumulate")
    message = rejection(lambda p: with_task(p, place(early), name="in/linear#0"))
    assert "in/linear#0 has the name of in/linear in a micro-batch" in message


def test_phases_of_a_step_in_one_go_are_refused():
    plan = masked_plan("data=2", micro_batches=1)
    program = plan.program("train")
    with pytest.raises(VerifyError, match="is in phase 1, but the step has one micro-batch"):
        verify(with_train(plan, lambda p: with_task(p, place("out/linear", program), phase=1)))


def test_a_read_of_the_whole_batch_is_refused():
    message = rejection(lambda p: with_task(p, place("read train"), phase=0))
    assert "read train fires once a step; rows are read for each micro-batch" in message


def test_storing_beside_the_steps_is_refused():
    def store(program):
        written = Task("keep", "write", "write", "write", inputs=("out/linear",), phase=3)
        order = (*program.order, ("write", (len(program.tasks),)))
        return replace(program, tasks=(*program.tasks, written), order=order)

    assert "keep write stores what a step gives, which must have one" in rejection(store)


def test_needing_a_task_of_a_later_phase_is_refused():
    update = next(t.name for t in train().tasks if t.op == "SgdUpdate")
    message = rejection(lambda p: with_task(p, place("out/linear"), after=(update,)))
    assert f"of phase 3 needs {update} of phase 4" in message


def test_using_what_a_later_phase_gives_is_refused():
    late = next(t for t in train().tasks if t.phase == 4 and t.outputs[0] in registers())
    message = rejection(
        lambda p: with_task(p, place("out/add"), inputs=(*task("out/add").inputs, late.outputs[0]))
    )
    assert f"of phase 3 needs {late.outputs[0]} of phase 4" in message


def registers():
    return {r.name for r in train().registers}


def task(name):
    return train().tasks[place(name)]


def test_a_part_of_the_batch_where_tasks_fire_once_is_refused():
    once = place(lambda t: t.phase == 4 and t.kind == "compute")
    message = rejection(
        lambda p: with_task(p, once, inputs=(*p.tasks[once].inputs, "out/linear"))
    )  # fmt: skip
    assert "fires once a step, but takes out/linear" in message
    assert "one micro-batch's" in message


def test_parts_of_another_loop_are_refused_since_only_the_last_is_left():
    early = next(t.outputs[0] for t in train().tasks if t.phase == 1 and t.op == "Compare")
    message = rejection(
        lambda p: with_task(p, place("out/add"), inputs=(*task("out/add").inputs, early))
    )
    assert f"takes {early} of another loop, of which only the last micro-batch is left" in message


def sums():
    return [t for t in train().tasks if t.op == "Accumulate" and t.phase == 3]


def test_a_sum_taken_before_its_end_is_refused():
    total = sums()[0].outputs[0]
    last = place(lambda t: t.phase == 3 and t.kind == "compute" and t.op == "RowProduct")
    message = rejection(lambda p: with_task(p, last, inputs=(*p.tasks[last].inputs, total)))
    assert f"takes {total} in the loop that gathers it; it is whole only after" in message


def test_a_variable_written_once_a_micro_batch_is_refused():
    message = rejection(
        lambda p: with_task(p, place("out/add"), outputs=("out/add", "out.bias.momentum"))
    )
    assert "writes variable out.bias.momentum once a micro-batch; once a step" in message


def test_a_part_made_once_a_step_is_refused():
    once = next(t for t in train().tasks if t.phase == 4 and t.op == "Divide")
    name = once.outputs[0]
    layout = next(r.layout for r in train().registers if r.name == name)
    message = rejection(lambda p: with_register(p, name, layout=(P, *layout[1:])))
    assert f"fires once a step, but gives {name}, which is P B: one micro-batch's" in message


def test_a_shared_value_made_in_each_turn_anew_is_refused():
    added = sums()[0]
    message = rejection(lambda p: with_task(p, place(added.name), op="Identity", attributes={}))
    assert f"gives {added.outputs[0]} once a micro-batch, though all share it" in message
    assert "only Accumulate and Collect do that" in message


def test_a_stream_that_goes_back_to_an_earlier_phase_is_refused():
    early = next(i for i, t in enumerate(train().tasks) if t.phase == 1 and t.kind == "compute")
    late = next(i for i, t in enumerate(train().tasks) if t.phase == 4 and t.kind == "compute")
    message = rejection(lambda p: swapped(p, early, late))
    assert "stream compute fires" in message
    assert "of a later phase before" in message


def test_fields_that_two_loops_use_need_a_slot_for_every_micro_batch():
    def few(program):
        for name in task("read train").outputs:
            program = with_register(program, name, slots=2)
        return program

    hang = rejection(few).splitlines()
    assert hang[0] == "program train would hang: 3 tasks wait for each other"
    assert hang[2].startswith("  read train of micro-batch 3 waits for cast")
    assert hang[2].endswith("of micro-batch 1 (for a slot of batch/x)")


def test_fields_of_one_read_of_which_each_loop_uses_another_need_these_slots_too():
    """The slots of a read are given back together, so its fields are filled together."""

    def apart(program):
        program = with_register(program, "batch/x", slots=2)
        program = with_register(program, "batch/label", slots=2)
        tasks = tuple(
            replace(t, inputs=tuple("batch/x" if n == "batch/label" else n for n in t.inputs))
            if t.phase == 3 else t
            for t in program.tasks
        )  # fmt: skip
        return replace(program, tasks=tasks)

    assert "(for a slot of batch/x)" in rejection(apart)


def test_memory_of_one_turn_that_a_sum_needs_in_the_next_is_refused():
    """Within a turn the two never live at once; only the turn after shows that they clash."""
    added = sums()[0]
    total = next(r for r in train().registers if r.name == added.outputs[0])
    first = next(t for t in train().tasks if t.phase == 3 and t.kind == "compute")
    message = rejection(lambda p: with_register(p, first.outputs[0], offset=total.offset))
    assert "share bytes" in message
    assert first.outputs[0] in message


def test_an_alias_of_what_another_loop_made_is_a_fault_with_a_name():
    total = next(t.outputs[0] for t in train().tasks if t.phase == 1 and t.op == "Accumulate")
    other = next(t.outputs[0] for t in train().tasks if t.phase == 1 and t.op == "Compare")
    message = rejection(lambda p: with_register(p, total, aliases=other))
    assert f"aliases {other}, which" in message
    assert "does not read" in message


def test_parts_of_another_length_than_the_batch_are_refused():
    r = next(r for r in train().registers if r.name == "out/linear")
    assert "out/linear" in rejection(
        lambda p: with_register(p, "out/linear", layout=(S(0), S(1), *r.layout[2:]))
    )
    assert "out/linear" in rejection(
        lambda p: with_register(p, "out/linear", layout=(B, *r.layout[1:]))
    )


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_kind_of_fault_is_refused_in_micro_batches_too(kind):
    for mutant in mutants(plan_of(MESHES[1]), 2, kinds=[kind]):
        with pytest.raises(MpiflowError) as caught:
            verify(mutant.plan)
        assert any(name in str(caught.value) for name in mutant.names), mutant.what
