"""What a Job or a Dataset refuses when it is made."""

import pytest

import mpiflow as mf
from mpiflow.errors import JobError

DATA = mf.Dataset("x-*.h5", batch=4)


def job(name="j", **settings):
    return mf.Job(name, lambda batch: {}, train=DATA, optimizer=mf.SGD(lr=0.1), **settings)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", ".x", "-x", "a/b", "a b", "a\0b"])
def test_a_job_is_named_as_its_folder_may_be(name):
    with pytest.raises(JobError, match="it names a folder"):
        job(name)


@pytest.mark.parametrize("name", ["digits", "a-b_c.d", "3d", "größe"])
def test_names_that_a_job_may_have(name):
    assert job(name).name == name


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "0", None])
def test_seeds_are_those_that_a_plan_holds(seed):
    with pytest.raises(JobError, match=r"a seed is a whole number from 0 to 2\*\*63 - 1, not"):
        job(seed=seed)
    with pytest.raises(JobError, match=r"Dataset 'x': a seed is"):
        mf.Dataset("x", batch=4, seed=seed)
    assert job(seed=2**63 - 1).seed == mf.Dataset("x", batch=4, seed=2**63 - 1).seed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "model must be of Callable, it is None"),
        ({"train": "x.h5"}, "train must be of Dataset, it is 'x.h5'"),
        ({"optimizer": "sgd"}, "optimizer must be of Optimizer, it is 'sgd'"),
        ({"evaluate": [DATA]}, r"evaluate must be of Dataset, it is \[Dataset"),
        ({"evaluate": {"a": "x.h5"}}, r"evaluate\['a'\] must be of Dataset, it is 'x.h5'"),
        ({"save": 5}, "save must be of Every, it is 5"),
        ({"evaluate_every": 5}, "evaluate_every must be of Every, it is 5"),
        ({"evaluate": DATA, "best": "loss"}, "best must be of Best, it is 'loss'"),
        ({"name": 5}, "name must be of str, it is 5"),
    ],
)
def test_a_setting_of_another_kind_is_named_with_what_was_given(settings, message):
    model = {"name": "j", "model": lambda batch: {}, "train": DATA, "optimizer": mf.SGD(lr=0.1)}
    with pytest.raises(JobError, match=message):
        mf.Job(**{**model, **settings})


@pytest.mark.parametrize(
    "make",
    [
        lambda: mf.Dataset(5, batch=4),
        lambda: mf.Dataset("x", batch=True),
        lambda: mf.Dataset("x", batch=4.0),
        lambda: mf.Every(steps=2.5),
        lambda: mf.Every(steps=-1),
        lambda: mf.Every(minutes=float("nan")),
        lambda: mf.Every(keep=0),
    ],
)
def test_counts_that_cannot_be_meant(make):
    with pytest.raises(JobError):
        make()
