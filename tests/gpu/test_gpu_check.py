"""The checks of benchmarks/gpu_check.py: on a GPU where there is one, on its stand-in anywhere."""

import importlib
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


@pytest.mark.parametrize("name", [*QUICK, "ops"])
def test_a_check_passes_on_a_gpu(gpu_check, name, tmp_path):
    try:
        bench = gpu_check.open_bench(False, tmp_path)
    except LaunchError as error:
        pytest.skip(str(error))
    assert gpu_check.run_check(bench, name, tmp_path / "gpu.jsonl"), (
        tmp_path / "gpu.jsonl"
    ).read_text()
