"""Whole plans: proven, deterministic, small, and equal to the golden one."""

import os
import subprocess
import sys
from pathlib import Path
from time import process_time

import pytest
from jobs import PLANS, digits_plan

from mpiflow.plan import store
from mpiflow.plan.verify import verify

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plans_are_proven_and_stored_without_loss(plan):
    plan = plan()
    again = store.loads(store.dumps(plan))
    assert again == plan
    verify(again)


def test_a_plan_does_not_grow_with_the_ranks():
    begin = process_time()
    few, many = (digits_plan(f"data={ranks}", 1024) for ranks in (2, 1024))
    assert process_time() - begin < 4
    sizes = [len(store.dumps(plan)) for plan in (few, many)]
    assert abs(sizes[1] - sizes[0]) < 0.05 * sizes[0]


def compiled(folder, seed, *, job, cwd):
    """The bytes of the plan that the command line compiles of a job file."""
    target = folder / f"seed{seed}.plan"
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mpiflow", "plan", job, "--ranks", "2", "-o", str(target)]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return target.read_bytes()


def test_the_same_job_gives_the_same_bytes_whatever_hash_seed_process_or_folder(tmp_path):
    source = (GOLDEN / "declared.py").read_text()
    for name in ("first", "second/deeper"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "job.py").write_text(source)
    first, second = tmp_path / "first", tmp_path / "second" / "deeper"
    plans = {
        compiled(tmp_path, 1, job=str(second / "job.py"), cwd=tmp_path),
        compiled(tmp_path, 2, job="../second/deeper/job.py", cwd=first),
    }
    assert len(plans) == 1
    assert str(tmp_path).encode() not in plans.pop()


@pytest.mark.parametrize("name", ["digits-2", "digits-2-staged", "digits-2-nccl"])
def test_the_digits_plan_is_the_golden_one(name):
    # Where a change of the compiler means to change plans: python tests/golden/renew.py
    sys.path.insert(0, str(GOLDEN))
    try:
        import renew
    finally:
        sys.path.remove(str(GOLDEN))
    golden = (GOLDEN / f"{name}.json").read_text().splitlines()
    actual = renew.golden_text(renew.TARGETS[f"{name}.json"]).splitlines()
    assert len(golden) == len(actual)
    pairs = enumerate(zip(golden, actual, strict=True), 1)
    different = [(line, a, b) for line, (a, b) in pairs if a != b]
    assert not different, f"{len(different)} lines differ, the first: {different[0]}"
