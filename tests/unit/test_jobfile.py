"""A job file gives a job, or one message that names the user's line."""

import pytest

from mpiflow.errors import GraphError, JobError, UsageError
from mpiflow.jobfile import load_job

HEAD = "import mpiflow as mf\n"
JOB = """
def job(batch: int = 4, lr: float = 0.1, deep: bool = False, name: str = "j", width=3, *, more=()):
    train = mf.Dataset("x-*.h5", batch=batch)
    return mf.Job(name, lambda batch: {}, train=train, optimizer=mf.SGD(lr=lr), seed=width)

def other(batch: int):
    return job(batch)
"""


@pytest.fixture
def load(tmp_path):
    def load(text, *settings, function=""):
        path = tmp_path / "mine.py"
        path.write_text(HEAD + text)
        return load_job(f"{path}{function}", settings)[0]

    return load


def test_settings_become_what_the_parameters_ask_for(load):
    job = load(JOB, "batch=8", "lr=1", "deep=true", "name=12", "width=5", "more=(1, 2)")
    assert (job.train.batch, job.optimizer.lr, job.name, job.seed) == (8, 1.0, "12", 5)
    assert type(job.optimizer.lr) is float


def test_a_function_can_be_named_and_the_folder_is_given(load, tmp_path):
    assert load(JOB, "batch=6", function=":other").train.batch == 6
    assert load_job(str(tmp_path / "mine.py"))[1] == tmp_path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["wdth=3"], "has no setting 'wdth'; it has batch=4, lr=0.1"),
        (["batch=1.5"], "--set batch=1.5: '1.5' is not a whole number"),
        (["batch=True"], "'True' is not a whole number"),
        (["lr=fast"], "'fast' is not a number"),
        (["deep=1"], "'1' is not true or false"),
        (["batch"], "write --set NAME=VALUE"),
    ],
)
def test_settings_that_cannot_be_meant(load, settings, message):
    with pytest.raises(UsageError) as error:
        load(JOB, *settings)
    assert message in str(error.value)


def test_a_setting_without_default_must_be_given(load):
    with pytest.raises(UsageError, match="'batch' has no default; give it with --set batch=VALUE"):
        load(JOB, function=":other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def job()\n    pass\n", "SyntaxError: expected ':' (mine.py, line 2)\n  {file}:2"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'\n"),
        ("def job():\n    return 1 / 0\n", "ZeroDivisionError: division by zero\n  {file}:3"),
        ("import sys\nsys.exit(4)\n", "the job file left by sys.exit(4)\n  {file}:3"),
        ("def job():\n    return 3\n", "returned int, not an mpiflow Job"),
        ("jobs = 3\n", "has no function 'job'; write `def job(...) -> mf.Job`"),
        ("def job():\n    mf.SGD(lr=-1)\n", "SGD: lr must be a number that is not negative"),
        ("def job():\n    mf.Job(nme='x')\n", "unexpected keyword argument 'nme'\n  {file}:3"),
    ],
)
def test_a_file_that_gives_no_job_is_explained(load, tmp_path, text, message):
    with pytest.raises(JobError) as error:
        load(text)
    assert message.format(file=tmp_path / "mine.py") in str(error.value)
    assert str(tmp_path / "mine.py") in str(error.value)


def test_an_error_in_another_file_of_the_user_names_both_lines(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text("def help():\n    raise KeyError('k')\n")
    with pytest.raises(JobError) as error:
        load("import helper_of_mine\ndef job():\n    helper_of_mine.help()\n")
    assert str(error.value) == (
        f"KeyError: 'k'\n  {tmp_path}/mine.py:4\n  {tmp_path}/helper_of_mine.py:2"
    )


@pytest.mark.parametrize("call", ["json.loads('x')", "np.random.default_rng(0).integers(0, -1)"])
def test_the_line_is_one_that_the_user_wrote_wherever_it_was_raised(tmp_path, monkeypatch, call):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"drawing_{call[:2]}"
    (tmp_path / f"{name}.py").write_text(
        f"import json\nimport numpy as np\ndef make(folder):\n    {call}\n"
    )
    path = tmp_path / "job.py"
    path.write_text(
        f"import mpiflow as mf\nfrom {name} import make\ndef job():\n"
        "    data = mf.Dataset('x.h5', batch=1, make=make)\n"
        "    return mf.Job('j', dict, train=data, optimizer=mf.SGD(lr=0.1))\n"
    )
    job, _ = load_job(str(path))
    with pytest.raises(JobError) as error:
        job.train.make(tmp_path)
    assert str(error.value).splitlines()[1:] == [f"  {tmp_path}/{name}.py:4"]


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("    return unknown(batch)\n", JobError, "NameError: name 'unknown' is not defined"),
        ("    return mf.no_such_name\n", JobError, "AttributeError"),
        ("    raise mf.MpiflowError('no line here')\n", Exception, "no line here\n"),
        ("    mf.nn.Dense(0)\n", GraphError, "width must be at least 1"),
    ],
)
def test_what_a_model_raises_names_its_line(load, tmp_path, model, kind, message):
    job = load(JOB.replace("lambda batch: {}", "model") + "\ndef model(batch):\n" + model)
    with pytest.raises(kind) as error:
        job.model({})
    assert message in str(error.value)
    assert str(error.value).count(f"{tmp_path}/mine.py:11") == 1


@pytest.mark.parametrize("name", ["missing.py", "job.txt", "plain"])
def test_no_such_job_file(name):
    with pytest.raises(UsageError, match=name):
        load_job(name)


def test_what_making_the_data_raises_names_the_line(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(
        "import mpiflow as mf\n"
        "def make(folder):\n"
        "    raise ValueError('no more room')\n"
        "def job():\n"
        "    data = mf.Dataset('x.h5', batch=1, make=make)\n"
        "    return mf.Job('j', dict, train=data, optimizer=mf.SGD(lr=0.1))\n"
    )
    job, _ = load_job(str(path))
    with pytest.raises(JobError, match=r"ValueError: no more room\n.*job\.py:3"):
        job.train.make(tmp_path)
