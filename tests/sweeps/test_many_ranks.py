"""Plans for many ranks are made and simulated in little time and memory, as ranks are folded."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

GPT = Path(__file__).resolve().parents[2] / "examples/gpt.py"
FORM = ("--set", "size=small", "--set", "batch=10240", "--mesh", "stage=16,data=80,model=8",
        "--micro-batches", "128", "--cluster", "h100")  # fmt: skip
CHILD = """
import resource, sys
from mpiflow.cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def command(*arguments):
    """The JSON object of a command, its CPU seconds, and the most memory it had, in bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments, "--json"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds, 1024 * int(done.stderr.split()[-1])


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "gpt.plan"
    found, seconds, nbytes = command("plan", str(GPT), *FORM, "-o", str(path))
    assert found["ranks"] == 10_240
    return path, seconds, nbytes


def test_10240_ranks_are_simulated_in_less_than_a_minute_and_2_gb(plan):
    path, planned, most = plan
    found, simulated, nbytes = command("simulate", str(path))
    assert sum(stage["ranks"] for stage in found["stages"]) == 10_240
    assert found["bubble_seconds"] > 0
    assert planned + simulated < 60  # 16 on a machine of 2026
    assert max(most, nbytes) < 2e9
