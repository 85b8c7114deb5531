"""`mpiflow run --device`: on the fake device as on the CPU; on cuda only where there is a GPU."""

import importlib.util

import pytest
from cli_job import STAGED, Runner, evaluations_of, steps_of, write_data, write_job


@pytest.fixture
def run(mpiexec, tmp_path):
    write_job(tmp_path, "evaluate=test, save=mf.Every(steps=4)")
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


def values(rows):
    """What a run gave, without what it took."""
    return [{k: v for k, v in row.items() if k != "seconds"}
            for row in steps_of(rows) + evaluations_of(rows)]  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [("--route", "nccl"), STAGED], ids=["nccl", "stages"])
def test_a_run_on_the_fake_device_gives_the_numbers_of_the_cpu_and_goes_on_there(run, options):
    form = () if "nccl" in options else STAGED
    wanted = values(run.train(2, "--steps", 9, *form, out="cpu"))
    fake = ("--device", "fake", *options)
    run.train(2, "--steps", 5, *fake, "--device-seed", 3)
    assert [r["loss"] for r in values(run.train(2, "--steps", 9, *fake)) if "step" in r][:9] == [
        r["loss"] for r in wanted if "step" in r
    ][:9]


@pytest.mark.ranks(2)
@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="cupy is installed")
def test_without_a_gpu_a_run_on_cuda_says_what_it_looked_for(run):
    done = run(2, "--device", "cuda")
    assert done.returncode == 1
    assert "--device cuda needs the Python package cupy, and a GPU" in done.stdout
    assert "make the plan with --device cpu" in done.stdout
    assert not (run.folder / "run").exists()
