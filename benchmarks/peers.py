"""Steps of mpiflow and of PyTorch by turns, for the workloads of a suite: who is faster, and how.

    BENCH_SUITE=FOLDER python benchmarks/peers.py W1 W2 W3 [--seconds 8] [--add runs.jsonl]
    python benchmarks/peers.py --table runs.jsonl

BENCH_SUITE has the suite's `common.py` and `torch_peer.py`; `peer.py` beside this file is mpiflow's
side. Both sides, on one rank and on two, are started once. Then they take turns of one step or
more, while the others sleep, so that a slow spell of the machine falls on all of them alike. Every
rank has one core and one thread. Prints the table of medians; a ratio above 1 says that mpiflow
takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
OURS, THEIRS = "mpiflow", "torch"
CASES = {  # workload: the variants of mpiflow, and those of PyTorch
    "W1": (["auto"], ["ddp"]),
    "W2": (["auto"], ["ddp", "channels_last"]),
    "W3": (["auto"], ["ddp"]),
    "W4": (["mp"], ["mp"]),
    "W5": (["1f1b"], ["1f1b"]),
    "W6": (["mp-sparse"], ["mp-sparse"]),
    "W7": (["mm", "ew"], ["mm", "ew"]),
}
ASKED = {"W1": 0.85, "W2": 0.92, "W3": 0.92, "W4": 0.85}
"""The efficiency of two ranks that is asked for."""


# ---------------------------------------------------------------- inside a side: one step a turn
def take_turns(
    arguments: Any, step: Any, full_loss: Any, sync: Any, *rest: Any, **more: Any
) -> None:
    """In place of the suite's `measure`: as many steps as the conductor says, each timed."""
    losses = [float(full_loss(step(i))) for i in range(3)]
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["BENCH_TURNS"])
        talk = line.makefile("rw")
        _say(talk, {"side": os.environ["BENCH_SIDE"], "losses": losses})
        done = len(losses)
        while (steps := int(talk.readline() or 0)) > 0:
            times = []
            for _ in range(steps):
                began, spent = time.perf_counter(), time.process_time()
                sync(step(done))
                times.append((time.perf_counter() - began, time.process_time() - spent))
                done += 1
            _say(talk, times)


def _say(talk: Any, what: Any) -> None:
    talk.write(json.dumps(what) + "\n")
    talk.flush()


def side(script: str) -> None:
    """Be a side: run its script with turns in place of the measurement.

    Arguments are the suite's. A script starts its ranks with them, and with this file.
    """
    sys.path[:0] = [os.environ["BENCH_SUITE"], str(Path(script).parent)]
    import common

    common.measure = take_turns
    code = compile(Path(script).read_text(), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script})


# ---------------------------------------------------------------- the conductor
@dataclass
class Side:
    """Some ranks that train a workload; `steps` has (wall seconds, CPU seconds) of the slowest."""

    peer: str
    variant: str
    ranks: int
    process: Any = None
    lines: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.peer} {self.variant} {self.ranks}"

    def turn(self, steps: int) -> float:
        """So many steps; gives the seconds of one."""
        for line in self.lines:
            line.write(f"{steps}\n")
            line.flush()
        ranks = [json.loads(line.readline()) for line in self.lines]
        made = [tuple(map(max, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
        self.steps += made
        return statistics.median(wall for wall, _ in made)


def started(workload: str, sides: list[Side], folder: str) -> None:
    """Start all sides, and wait until each of their ranks has made its first steps."""
    address = str(Path(folder) / "turns")
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(300)
        server.bind(address)
        server.listen()
        for one in sides:
            script = HERE.with_name("peer.py")
            if one.peer == THEIRS:
                script = Path(os.environ["BENCH_SUITE"]).resolve() / "torch_peer.py"
            command = [sys.executable, str(HERE), "--workload", workload, "--ranks",
                       str(one.ranks), "--variant", one.variant]  # fmt: skip
            first = min(os.sched_getaffinity(0))
            environment = {**os.environ, "BENCH_TURNS": address, "BENCH_SIDE": one.name,
                           "BENCH_SCRIPT": str(script), "BENCH_CORE": str(first)}  # fmt: skip
            one.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        by_name = {one.name: one for one in sides}
        for _ in range(sum(one.ranks for one in sides)):
            talk = server.accept()[0].makefile("rw")
            hello = json.loads(talk.readline())
            by_name[hello["side"]].lines.append(talk)
            by_name[hello["side"]].losses = hello["losses"]


def rounds(sides: list[Side], seconds: float) -> None:
    """Turns for so long, of so many steps that a short one counts for as much as a long one."""
    longest = max(one.turn(1) for one in sides)
    for one in sides:
        one.turn(1)
        one.steps.clear()
    ends = time.perf_counter() + seconds
    counts = [0] * len(sides)
    while time.perf_counter() < ends or min(counts) < 3:
        for number, one in enumerate(sides):
            took = one.turn(1)
            one.turn(max(1, min(20, int(longest / took))))
            counts[number] += 1


def measured(workload: str, seconds: float) -> dict[str, Any]:
    """The steps of every side of a workload."""
    ours, theirs = CASES[workload]
    sides = [
        Side(peer, variant, ranks)
        for peer, variants in ((OURS, ours), (THEIRS, theirs))
        for variant in variants
        for ranks in ((1,) if workload == "W7" else (1, 2))
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            started(workload, sides, folder)
            rounds(sides, seconds)
            for one in sides:
                for line in one.lines:
                    line.write("0\n")
                    line.flush()
                one.process.wait(30)
    finally:
        for one in sides:
            if one.process is not None:
                one.process.kill()
    return {
        "workload": workload,
        "sides": [
            {"peer": s.peer, "variant": s.variant, "ranks": s.ranks, "losses": s.losses,
             "steps": s.steps} for s in sides
        ],
    }  # fmt: skip


# ---------------------------------------------------------------- the table
def table(runs: list[dict[str, Any]]) -> str:
    """Medians of all steps of all runs of a workload, and the ratios of mpiflow to PyTorch."""
    found: dict[tuple[str, str, str, int], list[Any]] = {}
    losses = {}
    for run in runs:
        for s in run["sides"]:
            key = run["workload"], s["peer"], s["variant"], s["ranks"]
            found.setdefault(key, []).extend(s["steps"])
            losses[key] = s["losses"]
    lines = [
        "| workload | PyTorch's variant | ranks | steps | mpiflow ms | PyTorch ms | ratio"
        " | CPU ms | PyTorch's | ratio | efficiency (asked) | PyTorch's | losses differ by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (workload, peer, variant, ranks), steps in sorted(found.items()):
        if peer == OURS:
            continue
        ours = variant if (workload, OURS, variant, ranks) in found else CASES[workload][0][0]
        mine = found[workload, OURS, ours, ranks]
        cells = [workload, variant, ranks, f"{len(mine)} / {len(steps)}"]
        for i in (0, 1):
            a, b = (statistics.median(step[i] for step in of) for of in (mine, steps))
            cells += [
                f"{a * 1e3:.1f}",
                f"{b * 1e3:.1f}",
                f"**{a / b:.2f}**" if not i else f"{a / b:.2f}",
            ]
        for who, name in ((OURS, ours), (THEIRS, variant)):
            cells.append(_efficiency(found, workload, who, name) if ranks == 2 else "")
        if ranks == 2 and workload in ASKED:
            cells[-2] += f" ({ASKED[workload]})"
        both = losses[workload, OURS, ours, ranks], losses[workload, peer, variant, ranks]
        gap = max(abs(a - b) / abs(b) for a, b in zip(*both, strict=True))
        cells.append(f"{gap:.0e}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _efficiency(found: dict[Any, list[Any]], workload: str, peer: str, variant: str) -> str:
    """Half of the step on one rank over the step on two."""
    one, two = (statistics.median(s[0] for s in found[workload, peer, variant, n]) for n in (1, 2))
    return f"{one / 2 / two:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workloads", nargs="*", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=8, help="of turns, for each workload")
    parser.add_argument("--add", default=os.devnull, help="a file that gets a line a workload")
    parser.add_argument("--table", metavar="FILE", help="only print the table of such a file")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(line) for line in Path(given.table).read_text().splitlines()]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides end too
    made = []
    for workload in given.workloads or CASES:
        made.append(measured(workload, given.seconds))
        with open(given.add, "a") as file:
            file.write(json.dumps(made[-1]) + "\n")
    print(table(made))


if __name__ == "__main__":
    if "BENCH_SCRIPT" in os.environ:
        side(os.environ["BENCH_SCRIPT"])
    else:
        main()
