"""Predicted against measured seconds of a step, after calibrating this machine.

    python benchmarks/predicted_vs_measured.py [--cluster FILE.toml] [--quick] [--steps N]
                                               [--ranks 1,2] [NAME ...]

Calibrates on as many ranks as the largest number given, unless --cluster names a machine file;
then trains each job for some steps on each number of ranks, and compares the seconds of a step with
those of its plan. `median` is over all steps but the first ones, `calm` that of the calmest five
steps in a row, which other load on the machine disturbs least; errors are those of `calm`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM, CALM = 5, 5
JOBS = {
    "digits": ("digits.py",),
    "digits-wide": ("digits.py", "width=1024", "batch=256"),
    "resnet": ("images.py", "model=resnet18", "batch=4"),
    "alexnet": ("images.py", "batch=64"),
    "bert": ("bert.py", "batch=32"),
    "faces": ("faces.py", "batch=32"),
}


def run(ranks: int, *arguments: object) -> None:
    """`mpiflow` on so many ranks; its output is shown where it fails."""
    beside = Path(sys.executable).parent / "mpiexec"
    command = [beside if beside.exists() else "mpiexec", "-n", ranks, sys.executable, "-m",
               "mpiflow", *arguments]  # fmt: skip
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def compare(name: str, ranks: int, cluster: Path, data: Path, steps: int) -> tuple[float, ...]:
    """Predicted seconds of a step, the median, and that of the calmest steps."""
    file, *settings = JOBS[name]
    out = data / f"run-{name}-{ranks}"
    sets = [part for setting in settings for part in ("--set", setting)]
    run(ranks, "run", ROOT / "examples" / file, "--data", data, "--out", out, "--fresh",
        "--steps", steps + WARM, "--cluster", cluster, *sets)  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row][WARM:]
    windows = [seconds[i : i + CALM] for i in range(len(seconds) - CALM + 1)]
    predicted = rows[-1]["predicted"]["step_seconds"]
    return predicted, statistics.median(seconds), min(map(statistics.median, windows))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--cluster", type=Path)
    options.add_argument("--quick", action="store_true", help="calibrate --quick")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--ranks", default="1,2")
    options.add_argument("names", nargs="*", default=list(JOBS), metavar="NAME")
    given = options.parse_args()
    counts = [int(part) for part in given.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        subprocess.run(
            [sys.executable, ROOT / "examples" / "pack_digits.py", "--out", data / "digits"],
            check=True, capture_output=True,
        )  # fmt: skip
        cluster = given.cluster
        if cluster is None:
            cluster = data / "here.toml"
            run(max(counts), "calibrate", "-o", cluster, *["--quick"] * given.quick)
        errors = []
        print(f"{'job':12} ranks  predicted     median       calm   error", flush=True)
        for name in given.names:
            for ranks in counts:
                predicted, middle, calm = compare(name, ranks, cluster, data, given.steps)
                errors.append(abs(predicted / calm - 1))
                times = "".join(f"{1e3 * t:8.2f} ms" for t in (predicted, middle, calm))
                print(
                    f"{name:12} {ranks:5}{times}  {100 * (predicted / calm - 1):+5.0f} %",
                    flush=True,
                )
        print(
            f"median error {100 * statistics.median(errors):.0f} %,"
            f" largest {100 * max(errors):.0f} %"
        )


if __name__ == "__main__":
    main()
