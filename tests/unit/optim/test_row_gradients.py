"""Which tables are updated by rows, and what the user is told."""

import pytest

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.differentiate import differentiate
from mpiflow.errors import JobError
from mpiflow.graph.graph import Graph, building

ROWS, IDS = 50, 8


def added(optimizer, *, sparse=None, rows=ROWS, tied=False, scaled=False):
    """(the op that updates the table, remarks) of a model that looks up 8 rows."""
    graph = Graph("train")
    with building(graph):
        table = nn.Embedding(rows, 3, name="words", sparse=sparse)
        x = table(graph.input("ids", (IDS,), "int32"))
        loss = mf.mean(mf.square(nn.Dense(2, name="out")(x)))
        graph.outputs["loss"] = loss + mf.mean(table.as_logits(x)) if tied else loss
    remarks = differentiate(graph, optimizer, scaled=scaled)
    node = graph.assigns["words.weight"].node
    return node.op.name, remarks


@pytest.mark.parametrize(
    "optimizer",
    [mf.SGD(0.1), mf.SGD(0.1, clip=1.0), mf.Adagrad(0.1),
     mf.SGD(0.1, weight_decay=0.1, groups=(mf.Group("words.*", weight_decay=0.0),))],
    ids=repr,
)  # fmt: skip
def test_rows_are_updated_unasked_where_nothing_else_would_change(optimizer):
    for scaled in (False, True):
        name, remarks = added(optimizer, scaled=scaled)
        assert name.endswith("RowUpdate")
        assert not remarks


def test_a_table_of_no_more_rows_than_ids_is_updated_as_a_whole():
    assert added(mf.SGD(0.1), rows=IDS) == ("SgdUpdate", ())
    assert added(mf.SGD(0.1), rows=IDS + 1) == ("SgdRowUpdate", ())
    assert added(mf.SGD(0.1), rows=IDS, sparse=True) == ("SgdRowUpdate", ())


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (mf.SGD(0.1, momentum=0.9), "momentum"),
        (mf.SGD(0.1, weight_decay=0.1), "weight decay"),
        (mf.Adagrad(0.1, weight_decay=0.1), "weight decay"),
        (mf.Adam(0.1), "moments"),
        (mf.AdamW(0.1), "moments and weight decay"),
    ],
    ids=repr,
)
def test_the_lazy_form_is_taken_if_asked_for_and_said_so(optimizer, what):
    name, (remark,) = added(optimizer)
    assert not name.endswith("RowUpdate")
    kind = type(optimizer).__name__
    assert remark == (
        f"words.weight: all 50 rows are updated, since {kind} changes them by {what} even where a"
        " step looks up none; sparse=True updates the 8 or fewer that it looks up"
    )
    name, (remark,) = added(optimizer, sparse=True)
    assert name.endswith("RowUpdate")
    assert remark == (
        "words.weight: only rows that a step looks up are updated (sparse=True), the lazy form of"
        f" {kind}: for all others {what} stand still"
    )
    name, remarks = added(optimizer, sparse=False)
    assert (name.endswith("RowUpdate"), remarks) == (False, ())


@pytest.mark.parametrize(
    ("optimizer", "more", "reason"),
    [
        (mf.LAMB(0.1), {}, "LAMB has no update by rows"),
        (mf.LARS(0.1), {}, "LARS has no update by rows"),
        (mf.Adagrad(0.1, ema=0.9), {}, "an average (ema) changes in every row"),
        (mf.SGD(0.1), {"tied": True}, "words/linear"),
    ],
    ids=repr,
)
def test_what_cannot_be_updated_by_rows_is_updated_as_a_whole_and_said_so(optimizer, more, reason):
    name, (remark,) = added(optimizer, sparse=True, **more)
    assert not name.endswith("RowUpdate")
    assert remark.startswith("words.weight: sparse=True has no effect, and all rows are updated: ")
    assert reason in remark


def test_tied_tables_need_no_remark():
    assert added(mf.Adam(0.1), tied=True) == ("AdamUpdate", ())


def test_a_table_is_asked_for_in_one_way():
    graph = Graph("train")
    with building(graph):
        ids = graph.input("ids", (IDS,), "int32")
        table = nn.variable("table", (ROWS, 3), nn.normal(1.0))
        rows = mf.embedding(table, ids, sparse=True) + mf.embedding(table, ids, sparse=False)
        graph.outputs["loss"] = mf.mean(rows)
    with pytest.raises(JobError, match="table is looked up with sparse=True and with sparse=False"):
        differentiate(graph, mf.SGD(0.1))
