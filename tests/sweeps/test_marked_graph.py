"""The marked graph says of every plan what its loops, written out, say of it."""

import random
from itertools import product

import handmade
import pytest
from micro_jobs import masked_plan
from pipeline_jobs import Case, branches, layers, plan_of, tied
from together import joined

from mpiflow.plan.marked import Step
from mpiflow.plan.places import AHEAD
from mpiflow.plan.unroll import unroll
from mpiflow.plan.waits import in_turn, waits_of
from mpiflow.plan.walk import Order, Walk

PLANS = {
    "handmade": handmade.sharded,
    "micro-batches": lambda: masked_plan("data=2,model=2"),
    "1f1b": lambda: plan_of(Case(branches, "stage=3,data=2", 4)),
    "zero-bubble": lambda: plan_of(Case(layers, "stage=2", 6, "zero-bubble")),
    "interleaved": lambda: plan_of(Case(branches, "stage=2", 4, "interleaved", 2)),
    "one micro-batch": lambda: plan_of(Case(tied, "stage=2,data=2", 1)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_firing_is_surely_over_exactly_if_the_loops_written_out_say_so(name):
    for program in PLANS[name]().programs:
        step, unrolled = Step(program), unroll(program)
        order, index = Order(step), {task.name: i for i, task in enumerate(unrolled.tasks)}
        numbers = {}
        for i, task in enumerate(program.tasks):
            for micro in range(step.count if step.looped(i) else 1):
                firing = f"{task.name}#{micro}" if step.looped(i) else task.name
                numbers[index[firing]] = step.stream[i], step.number(i, micro)
        assert sorted(number for _, number in numbers.values()) == list(range(step.size))
        before = earlier(with_slots_of_reads(waits_of(unrolled), program, unrolled, index))
        some = random.Random(0).sample(sorted(numbers.items()), min(40, len(numbers)))
        for (a, use), (b, (_, number)) in product(numbers.items(), some):
            assert order.before(*use, number) == bool(before[b] >> a & 1), (a, b)


def earlier(waits):
    """By task: a bit for each that is done when it starts."""
    before, todo = [None] * len(waits), list(range(len(waits)))
    while todo:
        task = todo[-1]
        missing = [other for other in waits[task] if before[other] is None]
        todo += missing
        if not missing:
            todo.pop()
            before[task] = 0
            for other in waits[task]:
                before[task] |= before[other] | 1 << other
    return before


def with_slots_of_reads(waits, program, unrolled, index):
    """The waits, and that a read fills a slot after all that used it."""
    slots = {register.name: register.slots for register in program.registers}
    for read in (task for task in program.tasks if task.stream in AHEAD and task.phase % 2):
        back = min(slots[name] for name in read.outputs)
        for micro in range(back, program.micro_batches):
            held = {f"{name}#{micro - back}" for name in read.outputs}
            users = (i for i, task in enumerate(unrolled.tasks) if held & set(task.inputs))
            waits[index[f"{read.name}#{micro}"]].update(dict.fromkeys(users, "slot"))
    return waits


@pytest.mark.parametrize("name", PLANS)
def test_the_walk_of_all_stages_ends_where_the_stages_written_out_as_one_do(name):
    plan = PLANS[name]()
    for program in dict.fromkeys(program.name for program in plan.programs):
        steps = [Step(p) for p in plan.programs if p.name == program]
        together = joined(plan, program)
        assert sum(1 for _ in Walk(steps).run()) == len(in_turn(together, waits_of(together)))
