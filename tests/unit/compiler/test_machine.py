"""Machine files, which link an axis uses, and what things cost there."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from mpiflow.compiler.cost import (
    collective_seconds,
    compute_seconds,
    exchange_seconds,
    formula_seconds,
    ideal_seconds,
    message_seconds,
    op_seconds,
    packing_seconds,
    spread,
)
from mpiflow.compiler.machine import (
    Curve,
    Kernel,
    Link,
    Measured,
    Piece,
    built_in,
    find_machine,
)
from mpiflow.compiler.machinefile import parse, to_toml
from mpiflow.errors import UsageError
from mpiflow.graph.mesh import parse_mesh
from mpiflow.ops.conv import Conv
from mpiflow.ops.matmul import MatMul

ROOT = Path(__file__).parents[3]
SITE = """
name = "site"
nodes = 4
devices_per_node = 2
process_bytes = 75_000_000

[device]
memory_bytes = 80e9
memory_bandwidth = 8e9
launch_seconds = 1e-6
matrix_flops = { float32 = 6e10 }
vector_flops = { float32 = 1e9 }

[device.kernels]
MatMul = [2e-6, 1.5]

[links]
hierarchical = true

[links.inner]
latency_seconds = 1e-6
bandwidth = 1e10
[[links.inner.collectives]]
kind = "all_reduce"
members = 2
curve = [[0, 2e-6, 1e-10], [4096, 1e-5, 2e-10]]

[links.outer]
latency_seconds = 1e-5
bandwidth = 1e9
call_seconds = 3e-6
messages = [[0, 2e-5, 3e-10], [60000, 2e-4, 8e-9]]
overhead = [[0, 1e-6, 1e-10]]

[host_link]
latency_seconds = 1e-5
bandwidth = 3e10

[storage]
latency_seconds = 1e-4
bandwidth = 1e9
"""


def site(*changes):
    text = SITE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text.encode(), "site.toml")


def plain(machine):
    return [getattr(machine, name) for name in machine.__slots__]


# -- files


def test_a_file_gives_what_it_says():
    machine = site()
    assert (machine.name, machine.ranks, machine.memory_bytes) == ("site", 8, 80_000_000_000)
    assert machine.kernels == {"MatMul": Kernel(2e-6, 1.5)}
    sent = Curve((Piece(0.0, 2e-5, 3e-10), Piece(60000.0, 2e-4, 8e-9)))
    taken = Curve((Piece(0.0, 1e-6, 1e-10),))
    assert machine.outer == Link(1e-5, 1e9, 3e-6, messages=sent, overhead=taken)
    curve = Curve((Piece(0.0, 2e-6, 1e-10), Piece(4096.0, 1e-5, 2e-10)))
    assert machine.inner.measured == (Measured("all_reduce", 2, curve),)


@pytest.mark.parametrize("name", ["", "serial", *built_in()])
def test_a_machine_survives_its_own_text(name):
    own = {"": site(), "serial": site(("hierarchical = true", "overlap = false"))}
    machine = own.get(name) or find_machine(name)
    again = parse(to_toml(machine, {"": "one\n\ntwo", "device": "three"}).encode(), "again.toml")
    assert plain(again) == plain(machine)


@pytest.mark.parametrize("piece", [Piece(0.0, 5e-5, 0.0), Piece(0.0, 0.0, 1e-10)], ids=str)
def test_what_messages_take_from_kernels_may_not_depend_on_bytes_or_on_them_alone(piece):
    """As calibrating finds it now and then; a file that it writes has to be one."""
    machine = site()
    machine = replace(machine, outer=replace(machine.outer, overhead=Curve((piece,))))
    again = parse(to_toml(machine).encode(), "again.toml")
    assert again.outer.overhead == Curve((piece,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("nodes = 4", "node = 4"), "site.toml: node is no key that is known; did you mean nodes"),
        (("bandwidth = 1e10", "bandwith = 1e10"), "links.inner.bandwith .* did you mean bandwidth"),
        (("MatMul", "Matmul"), r"device.kernels.Matmul .* did you mean MatMul"),
        (("{ float32 = 6e10 }", "{ float23 = 6e10 }"), "matrix_flops.float23 .* float"),
        (("nodes = 4", "nodes = -4"), "nodes is -4; it must be a whole number"),
        (("nodes = 4", "nodes = 4.5"), "nodes is 4.5; it must be a whole number"),
        (("devices_per_node = 2", ""), "nodes is 4, and devices_per_node is missing"),
        (("bandwidth = 8e9", "bandwidth = 0"), "device.memory_bandwidth is 0; it must be above 0"),
        (("bandwidth = 8e9", 'bandwidth = "8 GB/s"'), "is '8 GB/s'; it must be a number"),
        (("launch_seconds = 1e-6", "launch_seconds = nan"), "a finite number of 0 or more"),
        (("launch_seconds = 1e-6", ""), "device.launch_seconds is missing; see docs/machines.md"),
        (("hierarchical = true", "hierarchical = 1"), "must be true or false"),
        (("{ float32 = 6e10 }", "{}"), "operations a second by dtype"),
        (("[2e-6, 1.5]", "[2e-6]"), "device.kernels.MatMul is .*it must be .seconds of a call"),
        (('"all_reduce"', '"allreduce"'), r"collectives\[0\].kind is 'allreduce'; it must be one"),
        (("members = 2", "members = 1"), r"collectives\[0\].members is 1; it must be 2 or more"),
        (("[0, 2e-6", "[1, 2e-6"), "pieces whose starts rise from 0"),
        (("[0, 2e-5", "[9, 2e-5"), "links.outer.messages .*pieces whose starts rise from 0"),
        (("[4096, ", "[0, "), "pieces whose starts rise from 0"),
        (("[0, 2e-6, 1e-10]", "[0, -2e-6, 1e-10]"), "a finite number of 0 or more"),
        (("1e-5, 2e-10]", "1e-5, 0]"), "rise where it ends"),
        (("[0, 2e-6, 1e-10]", "[0, 2e-6]"), r"curve\[0\] is .*seconds for each more"),
        (('name = "site"', "name = 7"), "name is 7; it must be text"),
        (('name = "site"', "name = "), "this is no TOML"),
        (("[storage]", "[[storage]]"), "it must be a table"),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(change, message):
    with pytest.raises(UsageError, match=message):
        site(change)


def test_the_name_of_a_file_shows_that_its_figures_changed(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    first = find_machine(str(path)).name
    path.write_text(SITE.replace("6e10", "7e10"))
    assert first.startswith("site ")
    assert find_machine(str(path)).name != first


def test_a_machine_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(UsageError, match="no machine 'h1000'; built in are a100, cpu, h100, h200"):
        find_machine("h1000")
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        find_machine(str(tmp_path / "none.toml"))


def test_the_file_in_the_documents_is_one():
    text = (ROOT / "docs/machines.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    machine = parse(block.encode(), "docs/machines.md")
    assert (machine.ranks, machine.inner.measured[0].kind) == (128, "all_reduce")


def test_gpus_are_ordered_as_their_makers_say():
    a100, h100, h200 = map(find_machine, ("a100", "h100", "h200"))
    assert a100.peak("bfloat16") < h100.peak("bfloat16") == h200.peak("bfloat16")
    assert a100.memory < h100.memory < h200.memory
    assert all(m.peak("float32") < m.peak("bfloat16") / 10 for m in (a100, h100, h200))
    assert all(m.inner.bandwidth > 5 * m.outer.bandwidth for m in (a100, h100, h200))


# -- links


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ("data=8", 8, [(8, 1)]),
        ("data=16", 8, [(8, 2)]),
        ("data=2,model=8", 8, [(1, 2), (8, 1)]),
        ("data=4,model=4", 8, [(2, 2), (4, 1)]),
        ("data=2,pipe=2,model=4", 8, [(1, 2), (2, 1), (4, 1)]),
        ("model=8,data=2", 8, [(4, 2), (2, 1)]),
        ("data=3,model=3", 8, [(2, 2), (2, 2)]),  # ranks 6 to 8 lie on two nodes
        ("data=2,model=3", 8, [(2, 1), (3, 1)]),  # all six ranks lie on one
        ("data=5", 2, [(2, 3)]),
        ("data=64", 0, [(64, 1)]),
        ("data=4,model=2", 1, [(1, 4), (1, 2)]),
    ],
)
def test_an_axis_stays_within_a_node_if_its_groups_do(mesh, devices, expected):
    mesh = parse_mesh(mesh)
    assert [spread(mesh, (axis,), devices) for axis in range(len(mesh.axes))] == expected


def nodes_of(mesh, axes, devices):
    """The most nodes on which a group along these axes lies, by listing the groups."""
    groups = {mesh.group(axes, rank) for rank in range(mesh.size)}
    return max(len({rank // devices for rank in group}) for group in groups)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("mesh", ["a=4,b=2", "a=3,b=2,c=2", "a=2,b=5", "a=12", "a=2,b=3,c=4"])
def test_the_link_is_that_of_the_listed_groups(mesh, devices):
    mesh = parse_mesh(mesh)
    every = range(len(mesh.axes))
    for axes in (c for n in every for c in combinations(every, n + 1)):
        within, nodes = spread(mesh, axes, devices)
        assert (nodes > 1) == (nodes_of(mesh, axes, devices) > 1), axes
        assert within * nodes >= mesh.extent(axes)


def test_the_axis_of_time_is_on_no_link():
    mesh = parse_mesh("data=2,model=8").in_time(4)
    assert [spread(mesh, (axis,), 8) for axis in (1, 2)] == [(1, 2), (8, 1)]


# -- prices


def test_cpu_prices_are_those_of_thakur_rabenseifner_and_gropp():
    cpu, mesh, n = find_machine("cpu"), parse_mesh("data=4"), 1 << 20
    seconds = {
        "all_reduce": 1.2e-5 + 4 * 4e-6 + 1.5 * n / 3e9 + 0.75 * n / 8e9,
        "reduce_scatter": 1.2e-5 + 2 * 4e-6 + 0.75 * n / 3e9 + 0.75 * n / 8e9,
        "all_gather": 1.2e-5 + 2 * 4e-6 + 0.75 * n / 3e9,
        "all_to_all": 1.2e-5 + 3 * 4e-6 + 0.1875 * n / 3e9,
    }
    for kind, expected in seconds.items():
        assert collective_seconds(cpu, kind, n, mesh, (0,)) == pytest.approx(expected)


def test_a_measured_collective_costs_what_was_measured():
    machine, mesh = site(), parse_mesh("data=1,model=2")
    assert collective_seconds(machine, "all_reduce", 1000, mesh, (1,)) == pytest.approx(2.1e-6)
    assert collective_seconds(machine, "all_reduce", 5096, mesh, (1,)) == pytest.approx(1.02e-5)
    assert collective_seconds(machine, "all_reduce", 1000, mesh, (0,)) == 0.0


def test_other_numbers_of_members_follow_the_formula():
    machine = replace(site(), devices_per_node=8)
    mesh = parse_mesh("model=4")
    ratio = formula_seconds(machine, machine.inner, "all_reduce", 1000, 4) / formula_seconds(
        machine, machine.inner, "all_reduce", 1000, 2
    )
    assert collective_seconds(machine, "all_reduce", 1000, mesh, (0,)) == pytest.approx(
        2.1e-6 * ratio
    )


def test_a_measured_message_costs_what_was_measured_and_any_other_latency_and_bytes():
    machine, mesh = site(), parse_mesh("stage=4")  # on two nodes
    assert message_seconds(machine, 1000, mesh) == pytest.approx(3e-6 + 2e-5 + 1000 * 3e-10)
    assert message_seconds(machine, 61_000, mesh) == pytest.approx(3e-6 + 2e-4 + 1000 * 8e-9)
    plain = replace(machine, outer=replace(machine.outer, messages=None))
    assert message_seconds(plain, 1000, mesh) == pytest.approx(3e-6 + 1e-5 + 1000 / 1e9)


def test_a_hierarchical_all_reduce_sends_a_part_over_the_outer_link():
    mesh, n = parse_mesh("data=4"), 8 << 20
    machine = replace(site(), inner=Link(1e-6, 1e10))
    formula = formula_seconds
    inside = formula(machine, machine.inner, "reduce_scatter", n, 2) + formula(
        machine, machine.inner, "all_gather", n, 2
    )
    across = formula(machine, machine.outer, "all_reduce", n // 2, 2)
    assert collective_seconds(machine, "all_reduce", n, mesh, (0,)) == pytest.approx(
        inside + across
    )
    flat = replace(machine, hierarchical=False)
    slowest = formula(machine, machine.outer, "all_reduce", n, 4)
    assert collective_seconds(flat, "all_reduce", n, mesh, (0,)) == pytest.approx(slowest)
    assert inside + across < slowest


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_more_bytes_and_more_nodes_never_cost_less(kind, name):
    machine = find_machine(name)
    prices = [
        [
            collective_seconds(machine, kind, 4**i, parse_mesh(f"data={ranks}"), (0,))
            for i in range(15)
        ]
        for ranks in (2, 8, 16, 64)
    ]
    assert all(row == sorted(row) for row in prices)
    if kind != "all_to_all":  # where each rank's part shrinks with their number
        assert all(list(column) == sorted(column) for column in zip(*prices, strict=True))


def test_several_axes_cost_what_one_of_as_many_ranks_does():
    machine, apart, joint = find_machine("h100"), parse_mesh("a=4,b=8"), parse_mesh("a=32")
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        seconds = collective_seconds(machine, kind, 1 << 20, apart, (0, 1))
        assert seconds == collective_seconds(machine, kind, 1 << 20, joint, (0,))


def test_an_exchange_with_all_others_costs_what_an_all_to_all_does():
    mesh, n = parse_mesh("data=4"), 1 << 20
    for machine in (find_machine("cpu"), replace(site(), devices_per_node=8)):
        seconds = collective_seconds(machine, "all_to_all", n, mesh, (0,))
        sent = n * 3 // 16
        assert exchange_seconds(machine, sent, 3, mesh, (0,)) == pytest.approx(seconds)
        assert exchange_seconds(machine, sent, 1, mesh, (0,)) < seconds
    assert exchange_seconds(find_machine("cpu"), 100, 1, parse_mesh("data=1"), (0,)) == 0.0


def test_products_and_other_operations_have_rates_of_their_own():
    machine = site()
    assert compute_seconds(machine, 10**9, 0, "float32", "matrix") == pytest.approx(1e-6 + 1 / 60)
    assert compute_seconds(machine, 10**9, 0, "float32") == pytest.approx(1e-6 + 1)
    assert compute_seconds(machine, 0, 8 * 10**9, "float32") == pytest.approx(1e-6 + 1)
    alike = replace(machine, vector_flops=())
    assert compute_seconds(alike, 10**9, 0, "float32") == pytest.approx(1e-6 + 1 / 60)


def test_a_measured_op_takes_a_call_and_a_multiple_of_the_roofline():
    shapes, out, dtypes = ((64, 64), (64, 64)), ((64, 64),), ("float32",) * 3
    ideal = 2 * 64**3 / 6e10
    assert op_seconds(site(), MatMul(), shapes, out, dtypes) == pytest.approx(2e-6 + 1.5 * ideal)
    bare = replace(site(), kernels={})
    assert op_seconds(bare, MatMul(), shapes, out, dtypes) == pytest.approx(1e-6 + ideal)


def test_columns_of_a_convolution_count_where_it_was_measured():
    conv = Conv(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    x, w, y = (2, 3, 8, 8), (5, 3, 3, 3), (2, 5, 8, 8)
    columns = 3 * 9 * 2 * 64
    assert conv.copied((x, w), (y,)) == 2 * columns
    machine, dtypes = replace(site(), memory=1e6), ("float32",) * 3
    touched = 4 * (2 * 3 * 64 + 5 * 27 + 2 * 5 * 64)
    ideal = ideal_seconds(machine, conv, (x, w), (y,), dtypes)
    assert ideal == pytest.approx((touched + 8 * columns) / 1e6)
    assert op_seconds(machine, conv, (x, w), (y,), dtypes) == pytest.approx(1e-6 + touched / 1e6)


def test_kernels_take_longer_the_more_ranks_are_at_work():
    kernels = {"MatMul": Kernel(2e-6, 1.5)}
    machine = replace(find_machine("cpu"), crowding=((1, 0.8), (5, 1.2)), kernels=kernels)

    def product(machine, n):
        shape, dtypes = (n, n), ("float32",) * 3
        return op_seconds(machine, MatMul(), (shape, shape), (shape,), dtypes)

    for ranks, by in ((1, 0.8), (3, 1.0), (5, 1.2), (40, 1.2)):
        busy = machine.with_ranks(ranks)
        assert busy.launch == pytest.approx(machine.launch * by)
        assert busy.memory == pytest.approx(machine.memory / by)
        for n in (8, 256):
            assert product(busy, n) == pytest.approx(by * product(machine, n))
    nodes = replace(machine, devices_per_node=1)
    assert nodes.with_ranks(40).launch == pytest.approx(machine.launch * 0.8)
    assert find_machine("cpu").with_ranks(7) is find_machine("cpu")


def test_only_cpus_of_one_host_take_tensors_unpacked():
    cpus, mesh = replace(find_machine("cpu"), devices_per_node=2), parse_mesh("data=2,model=2")
    data, model = ((mesh.index(axis),) for axis in ("data", "model"))
    assert packing_seconds(cpus, 8000, mesh, model) == 0.0
    for axes in (data, data + model):
        assert packing_seconds(cpus, 8000, mesh, axes) == 2 * 8000 / cpus.memory
    assert packing_seconds(site(), 8000, mesh, model) == 2 * 8000 / site().memory
