"""Every conversion between layouts, executed on threads, gives the logical tensor again."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from jobs import classifier_plan
from op_harness import join, parts

from mpiflow.compiler import boxing
from mpiflow.compiler.bucket import bucket
from mpiflow.compiler.build import Builder
from mpiflow.compiler.hops import move
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.memory import plan_memory
from mpiflow.compiler.schedule import schedule
from mpiflow.exec.arena import Arena
from mpiflow.exec.bind import Binder
from mpiflow.exec.device import Cpu
from mpiflow.exec.local import run_local
from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.graph.sbp import B, P, Partial, S, layout_text, shard_box
from mpiflow.ops import Fill
from mpiflow.ops.reduction import ReduceSum
from mpiflow.plan.records import Output, Program
from mpiflow.plan.traffic import bytes_sent
from mpiflow.plan.verify import verify

MACHINE = find_machine("cpu")
MAX = Partial("max")


def layouts(mesh, shape, *, more=(MAX,)):
    """All legal layouts of a tensor on a mesh."""
    choices = [B, P, *(S(d) for d in range(len(shape))), *more]
    return [
        layout for layout in product(choices, repeat=len(mesh.axes))
        if boxing.is_legal(layout, shape, mesh)
    ]  # fmt: skip


def conversion(source, target, shape, dtype, mesh):
    """A plan of one program: make the source, convert it, use the target."""
    build = Builder(mesh, MACHINE)
    made = build.register("source", shape, dtype, source)
    build.compute("make", Fill(shape, 1, dtype), [], [made], "test.py:1")
    converted = build.convert(made, target, "test.py:2")
    scalar = build.register("scalar", (), dtype, (B,) * len(mesh.axes))
    every = tuple(range(len(shape)))
    build.compute("use", ReduceSum(every), [converted], [scalar], "test.py:3")
    registers = tuple(build.registers.values())
    outputs = (Output("loss", "scalar"),)
    program = Program("evaluate", 1, registers, tuple(build.tasks), (), outputs)
    program = schedule(bucket(program, mesh, MACHINE))
    packed = plan_memory((), (program,))
    initialise = Program("initialise", 0, (), (), ())
    plan = replace(
        classifier_plan("data=1"), mesh=mesh, variables=(), data=(),
        arenas=(("host", packed.nbytes),), programs=(initialise, *packed.programs),
    )  # fmt: skip
    verify(plan)
    return plan, converted.name


def execute(transport, groups, plan, target, held):
    """(what this rank has of the target in the end, the bytes that it sent)."""
    program = plan.program("evaluate")
    arena = Arena(Cpu(), dict(plan.arenas)["host"])
    arena.scratch(0, arena.nbytes).fill(0xFF)  # NaN, where anything is read that was not written
    binder = Binder(
        program, plan.tensors(program), plan.slice(transport.rank), arena, groups, lambda: None
    )
    views = binder.views(0)
    step = binder.step(0, lambda: None, lambda: None)
    np.copyto(views["source"], held[plan.mesh.coordinates(transport.rank)])
    before = sum(group.sent for group in groups.values())
    for task, call in zip(step.tasks, step.calls, strict=True):
        if task.name not in ("make", "use"):
            call()
    return views[target].copy(), sum(group.sent for group in groups.values()) - before


def check_all(pairs, shape, dtype, mesh):
    draw = np.random.default_rng(len(pairs))
    whole = draw.integers(-50, 50, shape).astype(dtype)
    cases = []
    for source, target in pairs:
        plan, name = conversion(source, target, shape, dtype, mesh)
        cases.append((plan, name, target, parts(whole, source, mesh.sizes, draw)))

    def work(transport):
        rank = cases[0][0].slice(transport.rank)
        named = dict.fromkeys(axis for plan, *_ in cases for axis in plan.communicators())
        groups = {axis: transport.group(rank.members(axis), axis) for axis in named}
        return [execute(transport, groups, plan, name, held) for plan, name, _, held in cases]

    results = run_local(mesh.size, work)
    for i, (plan, _, target, _) in enumerate(cases):
        what = f"{shape} {layout_text(pairs[i][0])} to {layout_text(target)} on {mesh}"
        held = {mesh.coordinates(rank): found[i][0] for rank, found in enumerate(results)}
        joined = join(held, shape, dtype, target, mesh.sizes)
        np.testing.assert_allclose(joined, whole, rtol=1e-12, atol=1e-12, err_msg=what)
        most = max(found[i][1] for found in results)
        assert most == bytes_sent(plan, plan.program("evaluate")), what


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3, 4)]
)
@pytest.mark.parametrize("shape", [(5, 4), (1, 7), (6,), (2, 3, 5)], ids=str)
def test_every_pair_of_layouts_on_one_axis(size, shape):
    mesh = parse_mesh(f"data={size}")
    found = layouts(mesh, shape)
    check_all(list(product(found, found)), shape, "float64", mesh)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        pytest.param((2, 2), (5, 4), marks=pytest.mark.ranks(4)),
        pytest.param((2, 3), (3, 7), marks=pytest.mark.ranks(6)),
        pytest.param((2, 2), (3,), marks=pytest.mark.ranks(4)),
    ],
    ids=str,
)
def test_every_pair_of_layouts_on_two_axes(sizes, shape):
    mesh = parse_mesh(f"data={sizes[0]},model={sizes[1]}")
    found = layouts(mesh, shape, more=())
    check_all(list(product(found, found)), shape, "float64", mesh)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shape", [(12, 4), (20, 2), (4, 4)], ids=str)
def test_spans_in_units_convert_to_and_from_every_layout(shape):
    mesh = parse_mesh("data=3")
    found = layouts(mesh, shape, more=(S(0, 4), S(0, 2), S(1, 2)))
    check_all(list(product(found, found)), shape, "float64", mesh)


@pytest.mark.ranks(3)
def test_integers_convert_exactly():
    mesh = parse_mesh("data=3")
    found = layouts(mesh, (5, 4))
    check_all(list(product(found, found)), (5, 4), "int32", mesh)


def test_no_conversion_costs_more_than_a_way_round():
    mesh, shape = parse_mesh("data=2,model=3"), (6, 40)
    found = layouts(mesh, shape, more=())
    seconds = boxing.prices(found, found, shape, "float32", mesh, MACHINE)
    round_trips = seconds[:, :, None] + seconds[None, :, :]
    assert (seconds[:, None, :] <= round_trips + 1e-12).all()


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (1, 2)], ids=str)
def test_the_price_of_a_conversion_is_that_of_its_hops(sizes):
    mesh, shape = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes))), (6, 40)
    found = layouts(mesh, shape, more=(MAX, S(1, 4)))
    prices = boxing.prices(found, found, shape, "float32", mesh, MACHINE)
    pairs = list(product(enumerate(found), enumerate(found)))
    for (i, a), (j, b) in pairs[::5]:
        hops = boxing.path(a, b, shape, "float32", mesh, MACHINE)
        assert prices[i, j] == pytest.approx(sum(hop.seconds for hop in hops)), (a, b)


def test_a_sum_of_16_bits_has_no_price_where_its_parts_would_be_added():
    found = [(B,), (P,), (S(0),)]
    prices = boxing.prices(found, found, (6, 8), "bfloat16", parse_mesh("data=2"), MACHINE)
    assert [list(row) for row in np.isinf(prices)] == [[0, 0, 0], [1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (S(0), B, ["all_gather"]),
        (P, B, ["all_reduce"]),
        (MAX, B, ["all_reduce"]),
        (P, S(1), ["reduce_scatter"]),
        (S(0), S(1), ["all_to_all"]),
        (B, S(1), ["slice"]),
        (B, P, ["keep_first"]),
        (B, MAX, ["copy"]),
        (S(0), P, ["all_gather", "keep_first"]),
        (P, MAX, ["all_reduce", "copy"]),
        (P, P, []),
    ],
)
def test_one_axis_takes_the_collective_of_the_table(source, target, kinds):
    hops = boxing.path((source,), (target,), (6, 8), "float32", parse_mesh("data=2"), MACHINE)
    assert [hop.kind for hop in hops] == kinds


def hops_of(source, target, *, mesh="data=4,model=4", shape=(4000, 400), machine=MACHINE):
    mesh = parse_mesh(mesh)
    hops = boxing.path(source, target, shape, "float32", mesh, machine)
    return [(hop.kind, mesh.joined(hop.axes)) for hop in hops]


@pytest.mark.parametrize(
    ("source", "target", "hop"),
    [
        ((P, P), (B, B), ("all_reduce", "data,model")),
        ((MAX, MAX), (B, B), ("all_reduce", "data,model")),
        ((P, P), (S(0), S(0)), ("reduce_scatter", "data,model")),
        ((S(1), S(1)), (B, B), ("all_gather", "data,model")),
        ((B, B), (S(0), S(0)), ("slice", "data,model")),
        ((B, B), (P, P), ("keep_first", "data,model")),
        ((P, S(0)), (B, S(0)), ("all_reduce", "data")),
        ((S(0), P), (S(0), S(0)), ("reduce_scatter", "model")),
        ((S(0), P), (S(0), S(1)), ("reduce_scatter", "model")),
        ((S(0), S(1)), (S(1), S(0)), ("exchange", "data,model")),
        ((S(0), S(0)), (B, S(0)), ("exchange", "data,model")),
        ((S(0), S(0)), (S(1), S(1)), ("exchange", "data,model")),
        ((B, S(0)), (S(0), S(0)), ("exchange", "model")),
        ((P, S(0)), (P, S(1)), ("all_to_all", "model")),
    ],
    ids=str,
)
def test_one_hop_changes_what_it_can_on_both_axes(source, target, hop):
    mesh = parse_mesh("data=4,model=4")
    kind, axes = move(source, target, "float32", mesh)
    assert (kind, mesh.joined(axes)) == hop


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((P, S(0)), (S(0), S(0))),  # the shards would interleave
        ((P, B), (B, S(0))),
        ((P, P), (B, MAX)),
        ((P, P), (B, S(0))),
        ((S(0), S(0)), (P, P)),
        ((S(0), B), (P, B)),
    ],
    ids=str,
)
def test_two_things_at_once_are_no_single_hop(source, target):
    assert move(source, target, "float32", parse_mesh("data=4,model=4")) is None


def test_a_large_sum_is_scattered_before_it_crosses_nodes():
    nodes = replace(find_machine("h100"), devices_per_node=4, hierarchical=False)
    assert hops_of((P, P), (B, B), machine=nodes) == [
        ("reduce_scatter", "model"), ("all_reduce", "data"), ("all_gather", "model")
    ]  # fmt: skip
    assert hops_of((P, P), (B, B), machine=MACHINE) == [("all_reduce", "data,model")]


def test_the_axis_that_stays_outside_or_apart_takes_no_part_in_an_exchange():
    mesh = "pipe=2,data=2,model=2"
    source, target = (S(0), S(0), S(0)), (S(0), B, S(0))
    assert hops_of(source, target, mesh=mesh) == [("exchange", "data,model")]
    source, target = (S(1), S(0), P), (S(0), S(1), P)
    assert hops_of(source, target, mesh=mesh) == [("exchange", "pipe,data")]


@pytest.mark.parametrize(("shape", "sizes", "layout", "expected"), [
    ((12, 5), (2,), (S(0, 3),), (S(0),)),
    ((12, 5), (3,), (S(0, 6),), (S(0, 6),)),  # 2 units over 3 ranks: a span of plain 4 differs
    ((24, 5), (2, 2), (S(0, 6), S(0, 6)), (S(0), S(0))),
    ((12, 5), (2, 2), (S(0, 6), S(0, 6)), (S(0, 6), S(0, 6))),
    ((4, 6), (2, 3), (S(1, 3), B), (S(1), B)),
    ((0, 6), (2,), (S(0, 3),), (S(0),)),
])  # fmt: skip
def test_units_that_change_no_span_are_left_out(shape, sizes, layout, expected):
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
    assert boxing.without_units(layout, shape, mesh) == expected
    for where in product(*map(range, sizes)):
        assert shard_box(shape, layout, sizes, where) == shard_box(shape, expected, sizes, where)
