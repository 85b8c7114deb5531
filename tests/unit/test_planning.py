"""From a job, its data and the ranks to a plan."""

import numpy as np
import pytest

import mpiflow as mf
from mpiflow import nn
from mpiflow.errors import JobError, UsageError
from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.io.pack import pack
from mpiflow.planning import choose_mesh, make_plan, parse_memory

FIELDS = {"x": ((3,), "float32")}


def job(evaluate=None, best=None, **data):
    def model(batch):
        return {"loss": mf.mean(mf.square(nn.Dense(1, name="fc")(batch["x"])))}

    train = mf.Dataset("x-*.h5", batch=6, **data)
    return mf.Job("j", model, train=train, evaluate=evaluate, best=best, optimizer=mf.SGD(lr=0.1))


def plan(made, folder, ranks=2):
    return make_plan(made, folder, Mesh((("data", ranks),)), folder)


def test_the_mesh_is_what_is_said_or_all_ranks_on_the_data_axis():
    assert choose_mesh(4, None) == parse_mesh("data=4")
    assert choose_mesh(None, "data=2,model=3").size == 6
    assert choose_mesh(6, "data=2,model=3").size == 6


@pytest.mark.parametrize(
    ("ranks", "mesh", "message"),
    [
        (None, None, "--ranks N"),
        (0, None, "at least 1, not 0"),
        (4, "data=3", "has 3 ranks, --ranks says 4"),
        (None, "data", "'data' is not NAME=SIZE"),
        (None, "data=2,data=2", "axis 'data' occurs twice"),
    ],
)
def test_a_mesh_that_cannot_be_meant(ranks, mesh, message):
    with pytest.raises(UsageError, match=message):
        choose_mesh(ranks, mesh)


def test_declared_data_give_the_plan_of_the_files_but_for_the_files(tmp_path):
    declared = plan(job(fields=FIELDS, rows=20), tmp_path)
    pack({"x": np.ones((20, 3), np.float32)}, f"{tmp_path}/x-*.h5")
    assert plan(job(fields=FIELDS), tmp_path).programs == declared.programs
    assert declared.data[0].fingerprint == ""
    assert plan(job(), tmp_path).data[0].fingerprint != ""


@pytest.mark.parametrize("dtype", ["complex64", "str", "float128", "no such"])
def test_a_declared_dtype_that_no_tensor_has_is_refused(tmp_path, dtype):
    with pytest.raises(JobError, match=f"'x' is declared '{dtype}', which is none of"):
        plan(job(fields={"x": ((3,), dtype)}, rows=20), tmp_path)


def declared(batch=6):
    return mf.Dataset("y-*.h5", batch=batch, fields=FIELDS, rows=7)


@pytest.mark.parametrize("name", ["train", "a_tail", "", "a b", "a.b", "../up"])
def test_evaluations_whose_name_would_be_taken_for_another_are_refused(tmp_path, name):
    with pytest.raises(JobError, match="an evaluation cannot be named"):
        plan(job({name: declared()}, fields=FIELDS, rows=20), tmp_path)


def test_an_evaluation_may_have_fewer_rows_than_its_batch(tmp_path):
    made = plan(job({"small": declared(batch=64)}, fields=FIELDS, rows=20), tmp_path)
    assert [(p.name, p.rows) for p in made.programs if p.data == "small"] == [
        ("evaluate.small_tail", 7)
    ]


@pytest.mark.parametrize("metric", ["lose", "small.lose", "other.loss", "train.loss"])
def test_the_best_is_by_a_metric_that_there_is(tmp_path, metric):
    def with_best(name):
        return job({"small": declared()}, mf.Best(name), fields=FIELDS, rows=20)

    with pytest.raises(JobError, match=r"the evaluations give small\.loss$"):
        plan(with_best(metric), tmp_path)
    for name in ("loss", "small.loss"):
        assert plan(with_best(name), tmp_path).settings.best == "small.loss"


def test_data_are_made_where_no_file_is_and_only_there(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        pack({"x": np.ones((20, 3), np.float32)}, folder / "x-*.h5")

    first = plan(job(make=make), tmp_path)
    assert plan(job(make=make), tmp_path) == first
    assert made == [tmp_path]
    assert first.data[0].rows == 20


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40GiB", 40 << 30), ("512 mib", 512 << 20), ("1.5GB", 1_500_000_000), ("7kb", 7000), ("9", 9),
     ("3B", 3)],
)  # fmt: skip
def test_memory_is_given_in_binary_or_decimal_units(text, nbytes):
    assert parse_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "4 gibibytes", "0", "inf"])
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(UsageError, match=f"--memory {text}"):
        parse_memory(text)
