import handmade
import pytest
from handmade import Maker, collective, compute, program

from mpiflow.plan.traffic import bytes_sent, sent_by


def mixed(mesh, rows, columns, *, exchanges=True):
    """Every collective, with spans of unequal length on every axis."""
    m = Maker(mesh)
    gathered = ("a", "S(0) B", "b", "B B", "all_gather", "data")
    moves = [
        gathered,
        ("c", "P S(1)", "d", "S(0) S(1)", "reduce_scatter", "data"),
        ("e", "S(0) S(1)", "f", "S(1) S(1)", "all_to_all", "data"),
        ("g", "S(0) P", "h", "S(0) B", "all_reduce", "model"),
        ("i", "S(0) S(0)", "j", "S(0) B", "all_gather", "model"),
    ]
    moves = [m for m in moves if m[3] != "S(1) S(1)"]
    moves.append(("k", "S(0) S(1)", "l", "S(0) S(0)", "all_to_all", "model"))
    registers, tasks = [], []
    moves += [
        ("m", "P P", "n", "S(0) S(0)", "reduce_scatter", "data,model"),
        ("o", "P P", "p", "B B", "all_reduce", "data,model"),
        ("q", "S(1) S(1)", "r", "B B", "all_gather", "data,model"),
    ]
    moves += exchanges * [
        ("s", "S(0) S(1)", "t", "S(1) S(0)", "exchange", "data,model"),
        ("u", "S(0) S(0)", "v", "B S(0)", "exchange", "data,model"),
        ("w", "B S(0)", "x", "S(0) S(1)", "exchange", "model"),
        ("y", "S(0) B", "z", "B S(0)", "exchange", "data"),
    ]
    for i, (source, before, target, after, op, axis) in enumerate(moves):
        registers.append(m.tensor(source, (rows, columns), before, 0))
        registers.append(m.tensor(target, (rows, columns), after, 0))
        tasks.append(compute(f"t{i}", "make", "", source))
        tasks.append(collective(f"c{i}", op, axis, source, target))
    return m.plan([], [program("train", registers, tasks)], 10_000)


@pytest.mark.parametrize("mesh", ["data=1,model=1", "data=2,model=3", "data=5,model=4"])
@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (3, 2), (13, 24)])
def test_the_busiest_rank_is_found_without_asking_all(mesh, rows, columns):
    plan = mixed(mesh, rows, columns)
    train = plan.program("train")
    tensors = plan.tensors(train)
    collectives = [task for task in train.tasks if task.kind == "collective"]
    sent = []
    for rank in range(plan.mesh.size):
        view = plan.slice(rank)
        each = [view.sent_bytes(task, tensors) for task in collectives]
        assert [sent_by(view, task, tensors) for task in collectives] == each
        sent.append(sum(each))
    assert bytes_sent(plan, train) == max(sent)


def test_a_program_without_collectives_sends_nothing():
    assert bytes_sent(handmade.chain(3), handmade.chain(3).program("train")) == 0


def test_thousands_of_ranks_take_no_longer_to_count():
    plan = mixed("data=4096,model=16", 70_001, 333, exchanges=False)
    assert bytes_sent(plan, plan.program("train")) > 0
