"""A program with its loops written out, on one by hand and on one that was compiled."""

from dataclasses import replace

import pytest
from handmade import collective, compute, read
from micro_jobs import masked_plan

from mpiflow.graph.sbp import B, parse_layout
from mpiflow.plan.records import Output, Program, Register
from mpiflow.plan.unroll import ENOUGH, folded, slot_before, unroll


def register(name, layout, **more):
    return Register(name, (12,), "float32", parse_layout(layout), 0, 24, **more)


def in_phase(phase, task):
    return replace(task, phase=phase)


def by_hand(micro_batches=4):
    """Gather each micro-batch, add up what is made of it, and use the sum once.

    Layouts are on micro, data.
    """
    tasks = (
        in_phase(0, compute("first", "Fill", "", "one")),
        in_phase(1, read("read", "x")),
        in_phase(1, collective("gather", "all_gather", "data", "x", "g")),
        in_phase(1, compute("square", "Square", "g one", "y")),
        in_phase(1, compute("add", "Accumulate", "y", "sum")),
        in_phase(2, compute("last", "Scale", "sum", "end", after=("square", "first"))),
    )
    registers = (
        register("one", "B B"), register("x", "S(0) S(0)", slots=2), register("g", "S(0) B"),
        register("y", "P B"), register("sum", "B B"), register("end", "B B", aliases="sum"),
    )  # fmt: skip
    order = (("compute", (0, 3, 4, 5)), ("read", (1,)), ("comm.data", (2,)))
    outputs = (Output("loss", "end"), Output("sum", "sum"))
    return Program("train", 12, registers, tasks, order, outputs, data="train",
                   micro_batches=micro_batches)  # fmt: skip


def test_a_loop_fires_a_task_for_each_micro_batch_and_the_rest_is_itself():
    tasks = unroll(by_hand(2)).tasks
    assert [(t.name, t.micro) for t in tasks] == [
        ("first", 0),
        ("read#0", 0), ("gather#0", 0), ("square#0", 0), ("add#0", 0),
        ("read#1", 1), ("gather#1", 1), ("square#1", 1), ("add#1", 1),
        ("last", 0),
    ]  # fmt: skip


def test_parts_are_numbered_and_shared_values_are_not():
    tasks = {t.name: t for t in unroll(by_hand()).tasks}
    assert tasks["square#2"].inputs == ("g#2", "one")
    assert tasks["square#2"].outputs == ("y#2",)


def test_a_sum_takes_what_it_was_before_and_is_known_by_its_end():
    program = unroll(by_hand())
    tasks = {t.name: t for t in program.tasks}
    registers = {r.name: r for r in program.registers}
    assert tasks["add#0"].inputs == ("y#0",)
    assert tasks["add#3"].inputs == ("y#3", "sum#2")
    assert [registers[f"sum#{k}"].aliases for k in range(4)] == ["", "sum#0", "sum#1", "sum#2"]
    assert tasks["last"].inputs == ("sum#3",)
    assert registers["end"].aliases == "sum#3"
    assert [o.register for o in program.outputs] == ["end", "sum#3"]


def test_who_comes_after_a_task_of_a_loop_comes_after_its_last_turn():
    tasks = {t.name: t for t in unroll(by_hand()).tasks}
    assert tasks["last"].after == ("square#3", "first")


def test_a_collective_that_begins_a_turn_comes_after_the_compute_of_the_turn_before():
    tasks = {t.name: t for t in unroll(by_hand()).tasks}
    assert tasks["gather#0"].after == ()
    assert tasks["gather#1"].after == ("add#0",)
    assert tasks["gather#3"].after == ("add#2",)
    assert tasks["read#3"].after == ()  # a read runs ahead, as far as there are slots


def test_every_stream_ends_a_turn_before_it_begins_the_next():
    program = unroll(by_hand(3))
    named = {s: [program.tasks[i].name for i in order] for s, order in program.order}
    assert named == {
        "compute": ["first", "square#0", "add#0", "square#1", "add#1", "square#2", "add#2", "last"],
        "read": ["read#0", "read#1", "read#2"],
        "comm.data": ["gather#0", "gather#1", "gather#2"],
    }


@pytest.mark.parametrize(("micro_batches", "turns"), [(2, 2), (3, 3), (4, 3), (1000, 3)])
def test_enough_turns_are_a_first_a_middle_and_a_last(micro_batches, turns):
    program = unroll(by_hand(micro_batches), ENOUGH)
    assert sum(folded(t) == "read" for t in program.tasks) == turns
    assert program.outputs[1].register == f"sum#{turns - 1}"


def test_a_program_of_one_micro_batch_is_itself():
    program = by_hand(1)
    assert unroll(program) is program


@pytest.mark.parametrize(
    ("name", "micro", "slots", "before"),
    [("x#0", 0, 2, ("x#2", 1)), ("x#1", 1, 2, ("x#3", 1)), ("x#2", 2, 2, ("x#0", 0)),
     ("x#3", 3, 8, ("x#3", 2)), ("x#1", 1, 1, ("x#0", 0)), ("x", 0, 2, ("x", 2))],
)  # fmt: skip
def test_a_slot_is_that_of_so_many_micro_batches_before(name, micro, slots, before):
    found = slot_before(register(name, "S(0) B", slots=slots, micro=micro), 4)
    assert found == before


def compiled():
    return masked_plan("data=2,model=2").program("train")


def test_of_a_compiled_program_each_loop_is_written_out_in_place():
    program = compiled()
    written = unroll(program)
    phases = {t.name: t.phase for t in program.tasks}
    assert set(phases.values()) >= {1, 3}
    assert len(written.tasks) == sum(4 if phase % 2 else 1 for phase in phases.values())
    places = [(t.phase, t.micro) for t in written.tasks]
    assert places == sorted(places)
    assert len({t.name for t in written.tasks}) == len(written.tasks)
    assert len({r.name for r in written.registers}) == len(written.registers)


def test_of_a_compiled_program_memory_is_that_of_the_plan():
    program = compiled()
    plain = {r.name: (r.offset, r.nbytes, r.slots) for r in program.registers}
    made = {n: t.phase for t in program.tasks for n in t.outputs}
    for r in unroll(program).registers:
        name = r.name.rpartition("#")[0] or r.name
        assert (r.offset, r.nbytes, r.slots) == plain[name]
        assert ("#" in r.name) == bool(made[name] % 2)
        assert r.micro == (int(r.name.rpartition("#")[2]) if "#" in r.name else 0)


def test_of_a_compiled_program_every_input_is_there_before_it_is_used():
    written = unroll(compiled())
    made = {n: i for i, t in enumerate(written.tasks) for n in t.outputs}
    names = {r.name for r in written.registers}
    for i, task in enumerate(written.tasks):
        for name in task.inputs:
            assert name not in names or made[name] < i
    for _, order in written.order:
        turns = [(written.tasks[i].phase, written.tasks[i].micro) for i in order]
        assert turns == sorted(turns)


def test_what_is_early_is_used_by_every_turn_of_the_main_loop():
    written = unroll(compiled())
    shared = {r.name for r in written.registers if r.layout[0] == B}
    early = {n for t in written.tasks if t.phase < 3 for n in t.outputs} & shared
    used = [set(t.inputs) & early for t in written.tasks if t.phase == 3]
    assert any(name.endswith("#3") or "#" not in name for names in used for name in names)
    assert not any(name[-2:] in ("#0", "#1", "#2") for names in used for name in names)
