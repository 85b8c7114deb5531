"""Thirteen plans on the fake device: in any order of its streams they give the bits of the CPU, and
whatever is taken away from their synchronisation is found.

`--seeds 50` runs each in so many orders, and plants as many faults of each kind, if there are any.
"""

import random
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, product

import jobs
import numpy as np
import pytest
import table_jobs
from jobs import MemoryReader, classifier, evaluate, on_ranks, readers_of, train
from micro_jobs import arrays, masked
from pipeline_jobs import BATCH, Case, branches, layers, tied
from pipeline_jobs import plan_of as cached_plan

import mpiflow as mf
import mpiflow.exec.session as sessions
from mpiflow.compiler import signature
from mpiflow.errors import TaskError
from mpiflow.exec import bind
from mpiflow.plan.places import D2H, FEED, H2D, NCCL, ROUTES
from mpiflow.plan.records import COMPUTE, RECEIVE, SEND
from mpiflow.plan.rows import ROW_KINDS
from mpiflow.plan.unroll import unroll

pytestmark = [pytest.mark.ranks(2), pytest.mark.host("compares with the CPU itself")]

ON_DEVICE = (COMPUTE, H2D, D2H, FEED)
STEPS = 3


def classified(mesh, zero=0, **job):
    return jobs.compile_for(mesh, classifier(48, **job), zero=zero)


def cut(mesh):
    return pipeline_plan(Case(partial(masked), mesh, 4))


def by_owner(mesh):
    """Rows that travel as many as there are, between collectives of a known size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signature, "message_seconds", lambda *a: -5e-6)  # whatever it costs
        return table_jobs.plan_of(mf.SGD(0.1), mesh, sparse=True, split=mf.S(0), axis="data")


pipeline_plan = cached_plan.__wrapped__
"""Its cache does not tell routes apart."""
PLANS = {
    "data": lambda: classified("data=2"),
    "zero-1": lambda: classified("data=3", 1, optimizer=mf.Adam(0.1)),
    "zero-3": lambda: classified("data=2", 3),
    "model": lambda: classified("model=2"),
    "both": lambda: classified("data=2,model=2"),
    "micro-batches": lambda: cut("data=2"),
    "1f1b": lambda: pipeline_plan(Case(layers, "stage=2", 6)),
    "interleaved": lambda: pipeline_plan(Case(layers, "stage=2", 4, "interleaved", 2)),
    "zero-bubble": lambda: pipeline_plan(Case(tied, "stage=2", 4, "zero-bubble")),
    "unequal": lambda: pipeline_plan(Case(branches, "stage=2,data=1+2", 2)),
    "strided": lambda: pipeline_plan(Case(tied, "stage=2,data=2,model=1+2", 2)),
    "tables": lambda: table_jobs.plan_of(mf.Adagrad(0.1), "data=2", split=mf.S(0)),
    "rows by owner": lambda: by_owner("data=2"),
}


@cache
def plan_of(name, route=""):
    before, jobs.ROUTE = jobs.ROUTE, route
    try:
        return PLANS[name]()
    finally:
        jobs.ROUTE = before


def readers(name, plan):
    if name in ("tables", "rows by owner"):
        return {"train": MemoryReader(table_jobs.rows(), table_jobs.BATCH)}
    if plan.dataset("train").batch == BATCH:
        return {d.name: MemoryReader(arrays(BATCH), BATCH) for d in plan.data}
    return readers_of(plan)


def ran(name, route="", seed=0):
    """Training, an evaluation between where there is one, and the variables in the end."""

    def work(session):
        outputs = train(session, STEPS)
        if session.has("evaluate"):
            outputs += [values for _, values in evaluate(session)]
            session.expect("train", range(STEPS, STEPS + 1))
            outputs.append(session.run("train", STEPS))
        variables = {n: session.device.fetch(v).copy() for n, v in session.variables.items()}
        return outputs, variables

    plan = plan_of(name, route)
    return on_ranks(plan, work, readers(name, plan), seed)


def pytest_generate_tests(metafunc):
    """Each plan on every route; with one seed on one of them, in turn."""
    if "route" not in metafunc.fixturenames:
        return
    pairs = list(zip(PLANS, cycle(ROUTES), strict=False))
    if metafunc.config.option.seeds > 1:
        pairs = list(product(PLANS, ROUTES))
    metafunc.parametrize(("name", "route"), pairs, ids=["{} by {}".format(*pair) for pair in pairs])


@pytest.fixture
def seeds(request):
    return request.config.option.seeds


@pytest.fixture(autouse=True)
def _proven_once(monkeypatch):
    """Plans are proven when they are compiled; what is planted here would be refused."""
    monkeypatch.setattr(sessions, "verify", lambda plan: None)


def test_any_order_of_the_streams_gives_the_bits_of_the_cpu(name, route, seeds):
    wanted = on_host(name)
    for seed in range(seeds):
        for (outputs, variables), (theirs, values) in zip(
            ran(name, route, seed), wanted, strict=True
        ):
            assert outputs == theirs, f"seed {seed}"
            assert all(np.array_equal(variables[n], values[n]) for n in values), f"seed {seed}"


@cache
def on_host(name):
    return ran(name)


# -- planted faults


def programs_of(plan):
    """The training program of each stage, with its items and its tensors, in every micro-batch."""
    for stage in range(plan.mesh.stages):
        part = plan.at_stage(stage)
        program = part.program("train")
        written_out = unroll(program)
        tensors = part.tensors(program) | {r.name: r for r in written_out.registers}
        yield program, bind.items_of(written_out, tensors), tensors


def surely_done(items, stream, number, known):
    """How many items of each stream are done when one starts, whatever is late."""
    if (stream, number) in known:
        return known[stream, number]
    done = dict(surely_done(items, stream, number - 1, known)) if number else {}
    item = items[stream][number]
    if stream in ON_DEVICE or item.tasks[0].route == NCCL:
        done[stream] = number
    for other, count in item.waits:
        if count:
            for each, least in surely_done(items, other, count - 1, known).items():
                done[each] = max(done.get(each, 0), least)
            done[other] = max(done.get(other, 0), count)
    known[stream, number] = done
    return done


def without(items, stream, number, wait):
    found = list(items[stream])
    left = tuple(each for each in found[number].waits if each != wait)
    found[number] = replace(found[number], waits=left)
    return items | {stream: tuple(found)}


def disturbed(item, others, tensors):
    """Whether an item uses bytes that others use too, and any of them writes."""

    def spans(names):
        for each in map(tensors.__getitem__, names):
            start = each.offset + each.micro % each.slots * each.nbytes
            yield each.space, start, start + each.nbytes

    def overlap(some, more):
        return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in more)

    def used(one):
        inputs = [name for task in one.tasks for name in task.inputs]
        return [*spans(inputs)], [*spans([name for task in one.tasks for name in task.outputs])]

    reads, writes = used(item)
    return any(
        overlap(writes, [*used(each)[0], *used(each)[1]]) or overlap(reads, used(each)[1])
        for each in others
    )


def missing_waits(plan):
    """(stage, stream, number, wait) of each wait that alone keeps an item from bytes in use.

    Others are for memory of a whole loop, or order what shares none.
    """
    for program, items, tensors in programs_of(plan):
        for stream, own in items.items():
            for number, item in enumerate(own):
                if item.tasks[0].op in ROW_KINDS:  # which wait for an order that ranks agree on
                    continue
                for wait in item.waits:
                    rest = without(items, stream, number, wait)
                    sure = surely_done(rest, stream, number, {}).get(wait[0], 0)
                    early = items[wait[0]][sure : wait[1]]
                    if disturbed(item, early, tensors):
                        yield program.stage, stream, number, wait


def some(found, count):
    """So many of these, drawn at random but always the same."""
    found = list(found)
    return random.Random(len(found)).sample(found, min(count, len(found)))


FOUND = r"reads|overwrites|fills"
BETWEEN_RANKS = ("collective", SEND, RECEIVE)
KINDS = ("event", "unsynchronised send buffer", "reused while it is sent", "message")
"""What a missing wait leaves out: one for another stream of the device, one before something is
sent, one before what is sent is used again, and one for what comes from other ranks."""


def kind_of(waiting, awaited):
    """The kind of fault that it is if a task does not wait for another one."""
    takes = not set(awaited.outputs).isdisjoint(waiting.inputs)
    if awaited.kind in BETWEEN_RANKS:
        return "message" if takes else "reused while it is sent"
    return "unsynchronised send buffer" if takes and waiting.kind in BETWEEN_RANKS else "event"


def waits_by_kind(plan):
    """The missing waits of a plan, those of each kind in an order drawn at random."""
    stages = {program.stage: items for program, items, _ in programs_of(plan)}
    kinds = {kind: [] for kind in KINDS}
    for stage, stream, number, wait in missing_waits(plan):
        items, (other, count) = stages[stage], wait
        waiting, awaited = items[stream][number], items[other][count - 1]
        kind = kind_of(waiting.tasks[0], awaited.tasks[-1])
        kinds[kind].append((stage, stream, number, wait))
    return {kind: some(found, len(found)) for kind, found in kinds.items()}


def some_waits(name, route, count):
    """So many of each kind; if only one is wanted, that whose turn it is."""
    kinds = waits_by_kind(plan_of(name, route))
    if count > 1:
        return [wait for found in kinds.values() for wait in found[:count]]
    turn = list(PLANS).index(name)
    kinds = [found for found in kinds.values() if found]
    return kinds[turn % len(kinds)][:1] if kinds else []


def test_each_missing_wait_is_found(name, route, seeds, monkeypatch):
    plain = bind.items_of
    for stage, stream, number, wait in some_waits(name, route, seeds):

        def forgetful(program, tensors, at=(stage, stream, number, wait)):
            items = plain(program, tensors)
            return without(items, *at[1:]) if (program.name, program.stage) == (
                "train", at[0]) else items  # fmt: skip

        monkeypatch.setattr(bind, "items_of", forgetful)
        with pytest.raises(TaskError, match=FOUND):
            ran(name, route)
            pytest.fail(f"stage {stage}: item {number} of {stream} need not wait for {wait}")


def shared_places(plan):
    """(stage, x, y) of kernels that need x and y at the same time, both made by kernels.

    What lies in a bucket cannot move without the others.
    """
    for program, *_ in programs_of(plan):
        registers = {r.name: r for r in program.registers}
        messages = (t for t in program.tasks if t.kind == "collective" and len(t.inputs) > 1)
        joined = {n for t in messages for n in (*t.inputs, *t.outputs)}
        made = {n for t in program.tasks if t.stream == COMPUTE for n in t.outputs}
        for task in program.tasks:
            both = dict.fromkeys(n for n in task.inputs if n in made and n in registers)
            for x in both:
                for y in both:
                    held, taken = registers[x], registers[y]
                    if x != y and y not in joined and not held.aliases and not taken.aliases and (
                        0 < taken.nbytes * taken.slots <= held.nbytes and held.slots == 1
                    ):  # fmt: skip
                        yield program.stage, x, y


def with_one_place(plan, stage, x, y):
    def moved(program):
        offset = next(r.offset for r in program.registers if r.name == x)
        registers = tuple(
            replace(r, offset=offset) if r.name == y else r for r in program.registers
        )
        return replace(program, registers=registers)

    return replace(plan, programs=tuple(
        moved(p) if (p.name, p.stage) == ("train", stage) else p for p in plan.programs
    ))  # fmt: skip


def test_memory_that_is_used_again_too_early_is_found(name, route, seeds):
    plan = plan_of(name, route)
    for stage, x, y in some(shared_places(plan), seeds):
        broken = with_one_place(plan, stage, x, y)
        with pytest.raises(TaskError, match=FOUND):
            on_ranks(broken, lambda session: train(session, STEPS), readers(name, plan))
            pytest.fail(f"stage {stage}: {x} and {y} lie at the same place")


def test_a_pinned_slot_that_is_filled_again_too_early_is_found(name, route, seeds):
    plan = plan_of(name, route)

    def hurry(session):
        read = session._programs["train"].read
        if read is not None:
            read.ahead += 1
        return train(session, 2 * STEPS)

    for seed in range(min(seeds, 10)):
        with pytest.raises(TaskError, match=FOUND):
            on_ranks(plan, hurry, readers(name, plan), seed)


def test_the_plans_have_what_faults_are_planted_in():
    """Faults of every kind, on every route; otherwise nothing is proven."""
    for route in ROUTES:
        found = [waits_by_kind(plan_of(name, route)) for name in ("data", "1f1b")]
        for kind in KINDS:
            assert any(kinds[kind] for kinds in found), f"{kind} by {route}"
        assert any(any(shared_places(plan_of(name, route))) for name in PLANS), route
