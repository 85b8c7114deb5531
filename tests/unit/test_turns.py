"""What is to be alone is, and what need not be is not kept waiting."""

import threading
from types import SimpleNamespace

import pytest
import turns

PEOPLE = 4


def folk(folder, each):
    """Runs `each(turn, number)` on so many threads, each with locks of its own."""
    made = [turns.Turns(folder) for _ in range(PEOPLE)]
    threads = [threading.Thread(target=each, args=(one.turn, i)) for i, one in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for one in made:
        one.close()


def test_what_need_not_be_alone_is_together(tmp_path):
    together, met = threading.Barrier(PEOPLE), []

    def each(turn, number):
        with turn(alone=False):
            together.wait(20)
            met.append(number)

    folk(tmp_path, each)
    assert sorted(met) == list(range(PEOPLE))


def test_nobody_is_beside_what_is_alone_and_everybody_has_a_turn(tmp_path):
    inside, seen = [], []

    def each(turn, number):
        for i in range(50):
            alone = (i + number) % 3 == 0
            with turn(alone):
                inside.append(number)
                if alone:
                    threading.Event().wait(1e-4)
                seen.append((alone, inside.copy()))
                inside.remove(number)

    folk(tmp_path, each)
    assert len(seen) == 50 * PEOPLE
    assert all(len(there) == 1 for alone, there in seen if alone)


def item(nodeid, mark=None):
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: mark)


@pytest.mark.parametrize(
    ("one", "alone"),
    [
        (item("tests/mpi/test_cli_trace.py::test_it"), True),
        (item("tests/slurm/test_cluster.py::test_it[1]"), True),
        (item("tests/unit/slurm/test_templates.py::test_it"), False),
        (item("tests/unit/test_it.py::test_it", "a mark"), True),
    ],
)
def test_tests_that_are_alone_come_last(one, alone, tmp_path):
    assert turns.is_alone(one) == alone
    items = [one, item("tests/unit/a.py::test_a"), item("tests/unit/b.py::test_b")]
    worker = turns.Worker(tmp_path)
    worker.pytest_collection_modifyitems(items)
    worker.pytest_unconfigure()
    assert (items[-1] is one) == alone
    assert [each.nodeid[-1] for each in items if each is not one] == ["a", "b"]
