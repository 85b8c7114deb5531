"""Pieces of a stage keep what they need in as many slots as theory says, which are proven."""

from dataclasses import replace

import pytest
from mutants import with_register
from pipeline_jobs import Case, branches, plan_of

from mpiflow.compiler.pipeline import Pipeline, with_slots
from mpiflow.errors import VerifyError
from mpiflow.graph.sbp import B, S
from mpiflow.plan.peak import peak
from mpiflow.plan.records import Program, Register, Task
from mpiflow.plan.seats import seats
from mpiflow.plan.store import dumps, loads
from mpiflow.plan.unroll import unroll
from mpiflow.plan.verify import verify


def stage_of(stages, virtual, count, stage, size=lambda piece: 4):
    """A stage of kernels alone: piece j makes `kept j` going forward, and reads it going back."""
    tasks = []
    for piece in range(virtual):
        name = f"kept{piece}"
        back = 2 * virtual - 1 - piece
        tasks += [
            Task(f"f{piece}", "compute", "compute", "f", (), (name,), phase=1, segment=piece),
            Task(f"b{piece}", "compute", "compute", "b", (name,), phase=1, segment=back),
        ]
    tasks.sort(key=lambda task: task.segment)
    registers = tuple(
        Register(f"kept{j}", (count,), "float32", (S(0), B), 0, size(j)) for j in range(virtual)
    )
    return with_slots(
        Program(
            "train", count, registers, tuple(tasks), (("compute", tuple(range(2 * virtual))),),
            micro_batches=count, stage=stage,
            sequence=Pipeline("interleaved", virtual).sequence(stage, stages, count),
        )
    )  # fmt: skip


SHAPES = [
    (2, 2, 4),
    (8, 2, 16),
    (8, 2, 64),
    (4, 4, 16),
    (4, 3, 8),
    (3, 5, 12),
    (5, 2, 5),
    (2, 3, 2),
]
"""Stages, pieces of each, micro-batches."""


@pytest.mark.parametrize(("stages", "virtual", "count"), SHAPES)
def test_pieces_of_a_stage_keep_as_many_activations_as_theory_says(stages, virtual, count):
    """At stage 0 that is p + (p - 1) / v of a whole stage."""
    for stage in range(stages):
        program = stage_of(stages, virtual, count, stage)
        warm = 2 * (stages - stage - 1) + (virtual - 1) * stages
        slots = {r.pool or r.name: r.slots for r in program.registers}
        assert sum(slots.values()) == min(count * virtual, warm + 1)


def test_no_two_micro_batches_have_one_slot_at_once():
    program = stage_of(4, 3, 8, 1)
    taken, held = seats(program), {}
    for segment, micro in program.sequence:
        piece = min(segment, 5 - segment)
        slot = taken[f"kept{piece}"][micro]
        if segment < 3:
            assert slot not in held
            held[slot] = (piece, micro)
        else:
            assert held.pop(slot) == (piece, micro)
    assert not held
    offsets = {r.name: r.offset for r in unroll(program).registers}
    assert offsets == {
        f"{name}#{k}": 4 * slot for name, slots in taken.items() for k, slot in enumerate(slots)
    }


def test_registers_of_different_sizes_have_slots_of_their_own():
    program = stage_of(4, 2, 8, 0, size=lambda piece: 4 + 4 * piece)
    assert [(r.slots, r.pool) for r in program.registers] == [(8, ""), (4, "")]


@pytest.fixture(scope="module")
def plan():
    return plan_of(Case(branches, "stage=2", 8, "interleaved", 2))


def of_a_pool(plan):
    """A program, and those of its registers that have slots in common."""
    for program in plan.programs:
        if pools := {r.pool for r in program.registers if r.pool}:
            return program, [r for r in program.registers if r.pool == min(pools)]
    raise AssertionError("no registers have slots in common")


def with_program(plan, old, new):
    return replace(plan, programs=tuple(new if p is old else p for p in plan.programs))


def test_a_plan_with_slots_in_common_comes_back_from_its_file_and_adds_up(plan):
    _, members = of_a_pool(plan)
    assert len(members) == 2
    assert loads(dumps(plan)) == plan
    for stage in plan.stages():
        at = peak(stage)
        assert sum(nbytes for _, nbytes in at.classes) == stage.arena()


def test_a_slot_too_few_for_a_pool_is_refused(plan):
    program, members = of_a_pool(plan)
    new = program
    for register in members:
        new = with_register(new, register.name, slots=register.slots - 1)
    with pytest.raises(VerifyError, match=rf"register {members[0].name} of micro-batch .* share"):
        verify(with_program(plan, program, new))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slots": 1}, "do not have the same"),
        ({"offset": 0}, "do not have the same"),
        ({"rewound": False}, "beginning anew with each step"),
        ({"pool": ""}, "share bytes"),
    ],
)
def test_registers_of_a_pool_that_are_not_alike_are_refused(plan, changes, says):
    program, members = of_a_pool(plan)
    new = with_register(program, members[1].name, **changes)
    with pytest.raises(VerifyError, match=says):
        verify(with_program(plan, program, new))


def test_a_pool_is_for_kernels_alone(plan):
    program, _ = of_a_pool(plan)
    sent = next(t.inputs[0] for t in program.tasks if t.kind == "send")
    new = with_register(program, sent, pool=sent, rewound=True)
    with pytest.raises(
        VerifyError, match=f"only kernels of the last loop may use it, not .*{sent}"
    ):
        verify(with_program(plan, program, new))
