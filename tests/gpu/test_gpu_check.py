"""The checks of benchmarks/gpu_check.py: on a GPU where there is one, on its stand-in anywhere."""

import importlib
import json
import signal
import sys
from pathlib import Path

import pytest

from mpiflow.errors import LaunchError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUICK = ("environment", "products", "nccl", "overlap")


@pytest.fixture(scope="module")
def gpu_check():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu_check")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", QUICK)
def test_a_check_passes_on_the_stand_in(gpu_check, name, tmp_path):
    bench = gpu_check.open_bench(True, tmp_path)
    assert gpu_check.run_check(bench, name, tmp_path / "gpu.jsonl")


def test_no_kernel_waits_for_the_gpu_in_a_steady_step(gpu_check, tmp_path):
    assert gpu_check.run_check(gpu_check.open_bench(True, tmp_path), "steady", tmp_path / "j")
    assert json.loads((tmp_path / "j").read_text())["found"]["not"] == {}


def test_training_on_the_stand_in_has_the_losses_of_the_cpu(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "TRAINED", {"digits": gpu_check.TRAINED["digits"]})
    bench = gpu_check.open_bench(True, tmp_path)
    assert gpu_check.run_check(bench, "training", tmp_path / "gpu.jsonl")
    (row,) = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert row["found"]["digits"]["apart"] == 0


@pytest.mark.parametrize("fault", ["an error", "its time is up"])
def test_what_a_check_had_found_is_kept(gpu_check, tmp_path, monkeypatch, fault):
    def fails(bench, found):
        found["first"] = 1
        if fault == "an error":
            raise RuntimeError(fault)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setitem(gpu_check.CHECKS, "fails", (60, fails))
    file = tmp_path / "gpu.jsonl"
    assert not gpu_check.run_check(None, "fails", file)
    row = json.loads(file.read_text())
    assert row["found"] == {"first": 1}
    assert ("took more than 60 s" in row["error"]) == (fault != "an error")


@pytest.mark.parametrize("name", [*QUICK, "ops"])
def test_a_check_passes_on_a_gpu(gpu_check, name, tmp_path):
    try:
        bench = gpu_check.open_bench(False, tmp_path)
    except LaunchError as error:
        pytest.skip(str(error))
    assert gpu_check.run_check(bench, name, tmp_path / "gpu.jsonl"), (
        tmp_path / "gpu.jsonl"
    ).read_text()
