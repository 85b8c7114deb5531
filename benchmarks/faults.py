"""How often the right culprit is named when a rank fails or hangs, and how soon.

    python benchmarks/faults.py [--count 60] [--seed 0] [--kind KIND] [--pauses SECONDS]

Plants random faults (an exception, SIGSTOP, SIGKILL, an endless kernel, in Python or in C, a reader
that hangs, a lost message, a call of MPI that does not return, a rank busy between steps) at random
steps of random ranks, or before the first step (SIGSTOP or an endless loop while the plan is bound,
data that cannot be opened), on 2 to 4 ranks, in the job of `tests/mpi/cli_job.py`. Prints the share
that was named rightly, and the median of the seconds from the fault to the end of all ranks. With
--pauses, a run whose ranks are stopped and continued at random, for up to 2 s at a time and under
load, must end well: no false alarm.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/mpi"), str(ROOT / "tests"), str(ROOT)]

from cli_job import Runner, write_data, write_job  # noqa: E402

KINDS = (
    "main", "kernel", "SIGSTOP", "SIGKILL", "endless", "frozen", "slow", "lost", "deaf", "host",
    "binding", "unbound", "opening",
)  # fmt: skip
LONG = ("slow", "host", "binding", "unbound", "opening")
"""What has longer than 5 s by itself, as it may mend."""
LIMIT_SECONDS = 90


def named(kind: str, rank: int, ranks: int, out: str) -> bool:
    """Whether the output names the rank that was at fault."""
    said = " ".join(re.findall(r"^mpiflow: (.*)$", out, re.MULTILINE))
    if kind == "lost":
        return f"rank {rank} (" in said and "is lost" in said
    return bool(re.match(rf"rank {rank} (\(|of {ranks} )", said))


def mpiexec(
    count: int, *arguments: object, device: tuple[str, ...], timeout: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What `cli_job.Runner` starts ranks with; `device` is what its tests are asked to run on."""
    command = ["mpiexec", "-n", str(count), sys.executable, *map(str, (*arguments, *device))]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def inject(folder: Path, kind: str, rank: int, ranks: int, at: int) -> tuple[bool, float, str]:
    """Run with one fault: whether it was named, the seconds from then to the end, the output."""
    mark = folder / "fault"
    mark.unlink(missing_ok=True)
    runner = Runner(partial(mpiexec, device=()), folder)
    options = ("--steps", 10**6, "--fresh", *(("--stall", 5) if kind in LONG else ()))
    fault = f"{rank}:{kind}:{at}"
    done = runner(ranks, *options, timeout=LIMIT_SECONDS, FAULT=fault, MARK=str(mark))
    seconds = time.time() - mark.stat().st_mtime if mark.exists() else float("nan")
    right = done.returncode != 0 and named(kind, rank, ranks, done.stdout)
    return right, seconds, done.stdout


def faults(folder: Path, count: int, seed: int, kinds: tuple[str, ...]) -> None:
    """Plant `count` faults of these kinds, and print what came of them."""
    draw = random.Random(seed)
    right, delays = 0, []
    for number in range(count):
        kind, ranks = kinds[number % len(kinds)], draw.choice((2, 3, 4))
        rank, at = draw.randrange(ranks), draw.randrange(40, 200)
        fine, seconds, out = inject(folder, kind, rank, ranks, at)
        right += fine
        delays.append(seconds)
        print(f"{number + 1:4} {kind:8} rank {rank} of {ranks}: {'right' if fine else 'WRONG'},"
              f" {seconds:.1f} s", flush=True)  # fmt: skip
        if not fine:
            print(out)
    known = [seconds for seconds in delays if seconds == seconds]
    print(f"{right} of {count} named rightly; median {statistics.median(known):.1f} s from the"
          f" fault to the end of all ranks, longest {max(known):.1f} s")  # fmt: skip


def pauses(folder: Path, seconds: float, seed: int) -> None:
    """Stop and continue random ranks of a run, under load; it must not end before it is asked."""
    draw = random.Random(seed)
    command = [
        "mpiexec", "-n", "3", sys.executable, "-m", "mpiflow", "run", str(folder / "job.py"),
        "--data", str(folder), "--out", str(folder / "run"), "--fresh", "--steps", "1000000000",
    ]  # fmt: skip
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    listed = folder / "run/ranks.txt"
    while run.poll() is None and not listed.exists():
        time.sleep(0.1)
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", listed.read_text())]
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    end, stops = time.monotonic() + seconds, 0
    while time.monotonic() < end and run.poll() is None:
        pid = draw.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0.1, 2.0))
        os.kill(pid, signal.SIGCONT)
        time.sleep(draw.uniform(0.0, 1.0))
        stops += 1
    hog.kill()
    hog.wait()
    alarm = run.poll() is not None
    print(f"{stops} pauses in {seconds:.0f} s: {'a FALSE ALARM' if alarm else 'no false alarm'}")
    run.terminate()
    run.wait(60)


def main() -> None:
    """Plant faults, or pause ranks."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="plant no other")
    parser.add_argument("--pauses", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder, "evaluate=test, evaluate_every=mf.Every(steps=10**6)")
        write_data(folder)
        if options.pauses:
            pauses(folder, options.pauses, options.seed)
        else:
            kinds = (options.kind,) if options.kind else KINDS
            faults(folder, options.count, options.seed, kinds)


if __name__ == "__main__":
    main()
