"""Predicted against measured seconds of a step, after calibrating this machine.

    python benchmarks/predicted_vs_measured.py [--cluster FILE.toml] [--quick] [--steps N]
                                               [--ranks 1,2] [--cpu] [NAME ...]
    python benchmarks/predicted_vs_measured.py --layouts NAME [--cluster FILE.toml] ...
    python benchmarks/predicted_vs_measured.py --two-hosts NAME LAYOUT [--rounds N] [--steps N]
    mpiexec -n N python benchmarks/predicted_vs_measured.py --inside NAME LAYOUT --cluster FILE.toml

Calibrates on as many ranks as the largest number given, unless --cluster names a machine file;
then runs training steps of each job on each number of ranks, without saving or evaluating, and
compares them with the plan's prediction. `median` is over all steps but the first ones, `calm`
that of the calmest five steps in a row, which other load on the machine disturbs least; errors are
those of `calm`. With --layouts, one job runs on two ranks in five layouts, to compare their order
by predicted and by measured time; with --inside, one job in one layout on the ranks of an MPI job,
such as those of two_hosts.py, with data that stays in the temporary folder. With --two-hosts, each
of some rounds calibrates the two hosts of two_hosts.py anew and then runs the job on them, as cores
of virtual machines change their speed by the minute; medians over the rounds are compared. On a
busy machine --cpu counts the seconds that the main thread was at work, which says how good the
prices of kernels are; what ranks wait for is not in it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
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
    "gpt": ("gpt.py", "batch=32"),
}

LAYOUTS = {
    "data=2": ("data=2", 1, None),
    "data=2, 8 micro-batches": ("data=2", 8, None),
    "model=2": ("model=2", 1, None),
    "stage=2, 1 micro-batch": ("stage=2", 1, None),
    "stage=2, 4 micro-batches": ("stage=2", 4, None),
}
"""Mesh, micro-batches, ZeRO."""
INSIDE = {**LAYOUTS, "stage=2, 8 micro-batches": ("stage=2", 8, None)}


def train(name: str, layout: str, data: Path, cluster: str, steps: int, cpu: bool) -> None:
    """One rank of a job; rank 0 prints the predicted and the measured seconds as JSON."""
    from mpiflow.compiler.machine import find_machine
    from mpiflow.exec.failure import guard
    from mpiflow.exec.launch import connect
    from mpiflow.exec.session import Session
    from mpiflow.io.readers import open_readers
    from mpiflow.jobfile import load_job
    from mpiflow.planning import choose_mesh, make_plan

    file, *settings = JOBS[name]
    transport = connect()
    with guard(transport):
        job, folder = load_job(str(ROOT / "examples" / file), settings)
        # Rank 0 first: it may have data to generate.
        transport.on_root(lambda: job.train.make and job.train.make(data))
        axes, micro_batches, zero = INSIDE.get(layout, (None, 1, None))
        mesh = choose_mesh(transport.size, axes)
        job = replace(job, evaluate=None, micro_batches=micro_batches)
        plan = make_plan(job, folder, mesh, data, machine=find_machine(cluster), zero=zero)
        session = Session(plan, transport, open_readers(plan, transport.rank, data))
        session.run("initialise")
        session.expect("train", range(steps))
        clock, seconds = time.thread_time if cpu else time.perf_counter, []
        for step in range(steps):
            began = clock()
            session.run("train", step)
            seconds.append(clock() - began)
        session.close()
        transport.barrier().wait()
        if transport.rank == 0:
            print(json.dumps([plan.program("train").seconds, seconds]))


def mpiexec(ranks: int, *arguments: object) -> str:
    """What python prints on so many ranks."""
    beside = Path(sys.executable).parent / "mpiexec"
    start = beside if beside.exists() else "mpiexec"
    return output_of(start, "-n", ranks, sys.executable, *arguments)


def two_hosts(*arguments: object) -> str:
    """What python prints on two ranks, each on an emulated host of its own."""
    script = Path(__file__).with_name("two_hosts.py")
    return output_of(sys.executable, script, sys.executable, *arguments)


def output_of(*command: object) -> str:
    """What a command prints; its errors are shown where it fails."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def compare(
    name: str, ranks: int, *arguments: object, layout: str = ""
) -> tuple[float, float, float]:
    """Predicted seconds of a step, the median, and that of the calmest steps."""
    output = mpiexec(ranks, __file__, "--train", name, layout, *arguments)
    return figures(output)


def figures(output: str) -> tuple[float, float, float]:
    """Predicted seconds of a step, the median, and that of the calmest, of what `train` prints."""
    predicted, seconds = json.loads(output.splitlines()[-1])
    seconds = seconds[WARM:]
    windows = [seconds[i : i + CALM] for i in range(len(seconds) - CALM + 1)]
    return predicted, statistics.median(seconds), min(map(statistics.median, windows))


def milliseconds(found: Sequence[float]) -> str:
    return "".join(f"{1e3 * seconds:8.2f} ms" for seconds in found)


def inside(name: str, layout: str, cluster: Path, steps: int) -> None:
    """One job in one layout on the ranks that this is one of."""
    data, output = Path(tempfile.gettempdir()) / "mpiflow-predicted", io.StringIO()
    with redirect_stdout(output):
        train(name, layout, data, str(cluster), steps, cpu=False)
    if output.getvalue():
        found = figures(output.getvalue())
        print(f"{name:12} {layout}{milliseconds(found)}  {100 * (found[0] / found[2] - 1):+5.0f} %")


def by_rounds(name: str, layout: str, rounds: int, steps: int, folder: Path) -> None:
    """Calibrate two emulated hosts and run the job on them, by turns; medians over the rounds."""
    cluster, found = folder / "two.toml", []
    for number in range(1, rounds + 1):
        two_hosts("-m", "mpiflow", "calibrate", "-o", cluster)
        output = two_hosts(__file__, "--train", name, layout, folder, cluster, steps, False)
        found.append(figures(output))
        print(f"{name:12} {layout}  round {number} {milliseconds(found[-1])}", flush=True)
    middle = [statistics.median(column) for column in zip(*found, strict=True)]
    against = [f"{100 * (middle[0] / seconds - 1):+.0f} %" for seconds in middle[1:]]
    print(f"{name:12} {layout}  medians {milliseconds(middle)}")
    print(f"error: {against[0]} of the median, {against[1]} of calm steps")


def report(names: list[str], counts: list[int], *arguments: object) -> None:
    print(f"{'job':12} ranks  predicted     median       calm   error", flush=True)
    errors = []
    for name in names:
        for ranks in counts:
            found = compare(name, ranks, *arguments)
            errors.append(found[0] / found[2] - 1)
            times = milliseconds(found)
            print(f"{name:12} {ranks:5}{times}  {100 * errors[-1]:+5.0f} %", flush=True)
    sizes = [100 * abs(error) for error in errors]
    print(f"median error {statistics.median(sizes):.0f} %, largest {max(sizes):.0f} %")


def report_layouts(name: str, *arguments: object) -> None:
    """The layouts of a job by predicted time, and whether measured times have that order."""
    found = {layout: compare(name, 2, *arguments, layout=layout) for layout in LAYOUTS}
    print(f"{name:26} predicted     median       calm")
    predicted = sorted(found, key=lambda layout: found[layout][0])
    for layout in predicted:
        print(f"{layout:24}{milliseconds(found[layout])}")
    measured = sorted(found, key=lambda layout: found[layout][2])
    print("the same order" if measured == predicted else f"measured order: {measured}")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--cluster", type=Path)
    options.add_argument("--quick", action="store_true", help="calibrate --quick")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--ranks", default="1,2")
    options.add_argument("--cpu", action="store_true")
    options.add_argument("names", nargs="*", default=list(JOBS), metavar="NAME")
    options.add_argument("--layouts", metavar="NAME")
    options.add_argument("--inside", nargs=2, metavar=("NAME", "LAYOUT"))
    options.add_argument("--two-hosts", nargs=2, metavar=("NAME", "LAYOUT"))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--train", nargs=6, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.train:
        name, layout, data, cluster, steps, cpu = given.train
        train(name, layout, Path(data), cluster, int(steps), cpu == "True")
        return
    if given.inside and given.cluster is None:
        options.error("--inside needs --cluster")
    if given.inside:
        inside(*given.inside, given.cluster, given.steps + WARM)
        return
    counts = [int(part) for part in given.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        pack = [sys.executable, ROOT / "examples" / "pack_digits.py", "--out", data / "digits"]
        subprocess.run(pack, check=True, capture_output=True)
        if given.two_hosts:
            by_rounds(*given.two_hosts, given.rounds, given.steps + WARM, data)
            return
        cluster = given.cluster or data / "here.toml"
        if given.cluster is None:
            quick = ["--quick"] * given.quick
            mpiexec(max(counts), "-m", "mpiflow", "calibrate", "-o", cluster, *quick)
        more = data, cluster, given.steps + WARM, given.cpu
        if given.layouts:
            report_layouts(given.layouts, *more)
        else:
            report(given.names, counts, *more)


if __name__ == "__main__":
    main()
