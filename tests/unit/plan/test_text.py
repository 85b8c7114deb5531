import handmade
import pytest

from mpiflow.plan import store
from mpiflow.plan.text import show, size_text, summary, time_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (79_000, "77.1 KiB"),
     (10 * 2**20, "10.0 MiB"), (999 * 2**30, "999 GiB"), (3 * 2**60, "3072 PiB")],
)  # fmt: skip
def test_sizes_are_binary(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.5e-9, "1.50 ns"), (12.34e-6, "12.3 us"), (1.5e-3, "1.50 ms"), (2, "2.00 s"),
     (75.2, "1 min 15 s"), (3900, "1 h 05 min")],
)  # fmt: skip
def test_times_are_in_the_unit_that_reads_best(seconds, text):
    assert time_text(seconds) == text


@pytest.mark.parametrize("plan", [handmade.dense(), handmade.sharded(), handmade.chain(30)])
def test_every_item_has_one_line_of_at_most_120(plan):
    lines = show(plan).splitlines()
    assert max(map(len, lines)) <= 120
    for program in plan.programs:
        begin = next(
            i for i, line in enumerate(lines) if line.startswith(f"program {program.name}")
        )
        shown = [line.split()[0] for line in lines[begin + 2 : begin + 2 + len(program.tasks)]]
        assert sorted(shown) == sorted(task.name for task in program.tasks)
    assert store.digest(plan) in lines[1]


def test_tasks_stand_in_the_order_in_which_they_fire():
    lines = show(handmade.dense()).splitlines()
    begin = lines.index("program train: 5 rows of train, 11 tasks, 10.0 ms") + 2
    names = [line.split()[0] for line in lines[begin : begin + 11]]
    assert names.index("r0") < names.index("t1") < names.index("c0") < names.index("t8")
    assert "h S(0) 3x4, y S(0) 3 -> l P scalar" in lines[begin + 2]


def test_long_lists_of_operands_are_cut():
    m = handmade.Maker("data=2")
    names = [f"grad{i}" for i in range(40)]
    registers = [m.tensor(n, (), "P", 4 * i) for i, n in enumerate(names)]
    registers += [m.tensor(f"{n}.sum", (), "B", 4 * i, aliases=n) for i, n in enumerate(names)]
    task = handmade.collective("c0", "all_reduce", "data", " ".join(names),
                               " ".join(f"{n}.sum" for n in names))  # fmt: skip
    make = handmade.compute("t0", "make", "", " ".join(names))
    text = show(m.plan([], [handmade.program("train", registers, [make, task])], 160))
    assert "more -> " in text
    assert max(map(len, text.splitlines())) <= 120


def test_summary_has_the_figures_of_the_plan():
    plan = handmade.dense()
    figures = summary(plan)
    assert figures["digest"] == store.digest(plan)
    assert figures["mesh"] == {"data": 2}
    assert figures["parameters"] == 20
    assert (figures["nodes"], figures["tasks"]) == (8, 16)
    assert figures["plan_bytes"] == len(store.canonical(plan))
    assert figures["predicted"]["step_seconds"] == 0.01
    assert figures["predicted"]["peak_bytes"] == {"host": 544}
    assert figures["predicted"]["bytes_sent"] == 84
    assert figures["collectives"] == [
        {"kind": "all_reduce", "axis": "data", "bytes": 80, "times": 1},
        {"kind": "all_reduce", "axis": "data", "bytes": 4, "times": 1},
    ]
    assert figures["notes"] == list(plan.notes)
