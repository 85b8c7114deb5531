"""Messages of rows by owner: what is wrong with one is found before it runs."""

from dataclasses import replace

import pytest

from mpiflow.errors import VerifyError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import parse_layout
from mpiflow.plan.records import Register, Task, communication_stream
from mpiflow.plan.rows import FETCH, SEND, most_sent, owned_span, row_staging
from mpiflow.plan.slice import RankPlan
from mpiflow.plan.traffic import firing_bytes
from mpiflow.plan.verify_layout import check_collective

MESH = Mesh((("data", 2), ("model", 3)))
ROWS, WIDTH, IDS = 11, 4, 7


def register(name, shape, dtype, layout):
    return Register(name, shape, dtype, parse_layout(layout), 0, 0)


def fetch():
    tensors = [
        register("table", (ROWS, WIDTH), "float32", "B S(0)"),
        register("ids", (IDS,), "int32", "S(0) S(0)"),
        register("rows", (IDS, WIDTH), "float32", "S(0) S(0)"),
    ]
    return message(FETCH, tensors, 2, {})


def send():
    tensors = [
        register("sums", (IDS, WIDTH), "float32", "B S(0)"),
        register("ids", (IDS,), "int64", "B S(0)"),
        register("owned", (IDS, WIDTH), "float32", "B P(union)"),
        register("owned.ids", (IDS,), "int64", "B P(union)"),
    ]
    return message(SEND, tensors, 2, {"rows": ROWS})


def message(kind, registers, inputs, attributes):
    tensors = {r.name: r for r in registers}
    names = list(tensors)
    task = Task(
        "t", "collective", communication_stream("model"), kind, tuple(names[:inputs]),
        tuple(names[inputs:]), attributes, "model",
    )  # fmt: skip
    return replace(task, workspace=(0, row_staging(task, tensors, MESH))), tensors


def check(task, tensors):
    check_collective(task, tensors, MESH, "program train")


def test_messages_as_the_compiler_makes_them_are_accepted():
    check(*fetch())
    check(*send())


@pytest.mark.parametrize(
    ("made", "name", "changes", "says"),
    [
        (fetch, "table", {"layout": parse_layout("S(0) S(0)")}, "on axis data"),
        (fetch, "table", {"layout": parse_layout("B B")}, "on axis model"),
        (fetch, "ids", {"layout": parse_layout("S(0) B")}, "on axis model"),
        (fetch, "rows", {"layout": parse_layout("B S(0)")}, "on axis data"),
        (fetch, "rows", {"shape": (IDS, WIDTH + 1)}, "takes rows (7, 5) of a table (11, 4)"),
        (fetch, "rows", {"dtype": "float64"}, "float64 rows of a float32 table"),
        (send, "owned", {"layout": parse_layout("B P")}, "on axis model"),
        (send, "owned.ids", {"layout": parse_layout("B S(0)")}, "on axis model"),
        (send, "sums", {"layout": parse_layout("S(0) S(0)")}, "on axis data"),
        (send, "owned.ids", {"dtype": "int32"}, "by int32"),
        (send, "owned", {"shape": (IDS + 1, WIDTH)}, "to (8, 4)"),
    ],
)
def test_an_operand_that_does_not_fit_is_named(made, name, changes, says):
    task, tensors = made()
    with pytest.raises(VerifyError) as caught:
        check(task, {**tensors, name: replace(tensors[name], **changes)})
    assert says in str(caught.value)


@pytest.mark.parametrize("made", [fetch, send])
def test_a_workspace_that_is_too_small_and_missing_operands_are_refused(made):
    task, tensors = made()
    offset, size = task.workspace
    for changes in (
        {"workspace": (offset, size - 1)}, {"inputs": task.inputs[:1]}, {"outputs": ()}
    ):  # fmt: skip
        with pytest.raises(VerifyError):
            check(replace(task, **changes), tensors)


@pytest.mark.parametrize("rows", [0, "11", None, True])
def test_a_table_without_rows_is_refused(rows):
    task, tensors = send()
    with pytest.raises(VerifyError, match="owners of"):
        check(replace(task, attributes={"rows": rows}), tensors)


def test_the_plan_has_the_bytes_of_the_rank_that_may_send_most():
    for task, tensors in (fetch(), send()):
        views = [RankPlan(MESH, rank, MESH.coordinates(rank)) for rank in range(MESH.size)]
        most = max(most_sent(view, task, tensors) for view in views)
        assert firing_bytes(task, tensors, MESH) == most


def test_owners_have_what_the_table_is_split_into():
    spans = [owned_span(RankPlan(MESH, r, MESH.coordinates(r)), "model", ROWS) for r in range(6)]
    assert spans == 2 * [(0, 4), (4, 8), (8, 11)]
    both = [owned_span(RankPlan(MESH, r, MESH.coordinates(r)), "data,model", 5) for r in range(6)]
    assert both == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 5)]
