"""Steps of mpiflow and of PyTorch by turns, for the workloads of a suite: who is faster, and how.

    BENCH_SUITE=FOLDER python benchmarks/peers.py W1 W2 W3 [--seconds 8] [--add runs.jsonl]
    python benchmarks/peers.py --table runs.jsonl

BENCH_SUITE has the suite's `common.py` and `torch_peer.py`; `peer.py` beside this file is mpiflow's
side. Both sides, on one rank and on two, are started once. Then they take turns of two steps or
more, while the others sleep, so that a slow spell of the machine falls on all of them alike. Every
rank has one core and one thread. Prints tables of medians: mpiflow beside PyTorch, and the
efficiency of two ranks, with what it would be if messages were free.
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
    "W1": (["mp", "zero", "dp"], ["ddp"]),
    "W2": (["auto"], ["ddp", "channels_last"]),
    "W3": (["auto"], ["ddp"]),
    "W4": (["mp"], ["mp"]),
    "W5": (["1f1b"], ["1f1b"]),
    "W6": (["mp-sparse"], ["mp-sparse"]),
    "W7": (["mm", "ew"], ["mm", "ew"]),
}
ASKED = {"W1": 0.85, "W2": 0.92, "W3": 0.92, "W4": 0.85}
"""The efficiency of two ranks that is asked for."""
SHARED = {"W1": "batch", "W2": "batch", "W3": "batch", "W4": "classes"}
"""What two ranks share. Two jobs of one rank, each with half of it, at once: as if messages and
waits cost nothing, on a machine whose cores share memory."""
HALVES = "halves"
_TURN_SECONDS = 0.5


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
    if shared := os.environ.get("BENCH_SHARED"):
        sizes = getattr(common, sys.argv[sys.argv.index("--workload") + 1])
        sizes[shared] //= 2
    code = compile(Path(script).read_text(), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script})


# ---------------------------------------------------------------- the conductor
@dataclass
class Side:
    """Some ranks that train a workload; `steps` has (wall seconds, CPU seconds) of the slowest.

    Those of `shared` are jobs by themselves, each with its part of what is so called.
    """

    peer: str
    variant: str
    ranks: int
    shared: str = ""
    processes: list[Any] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.peer} {self.variant} {self.ranks} {self.shared}"

    def start(self, workload: str, address: str) -> None:
        """Start the ranks, or the jobs of one rank, each on a core of its own."""
        script = HERE.with_name("peer.py")
        if self.peer == THEIRS:
            script = Path(os.environ["BENCH_SUITE"]).resolve() / "torch_peer.py"
        ranks = 1 if self.shared else self.ranks
        command = [sys.executable, str(HERE), "--workload", workload, "--ranks", str(ranks),
                   "--variant", self.variant]  # fmt: skip
        for core in sorted(os.sched_getaffinity(0))[: self.ranks // ranks]:
            environment = {**os.environ, "BENCH_TURNS": address, "BENCH_SIDE": self.name,
                           "BENCH_SCRIPT": str(script), "BENCH_CORE": str(core),
                           "BENCH_SHARED": self.shared}  # fmt: skip
            started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            self.processes.append(started)

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
            one.start(workload, address)
        by_name = {one.name: one for one in sides}
        for _ in range(sum(one.ranks for one in sides)):
            talk = server.accept()[0].makefile("rw")
            hello = json.loads(talk.readline())
            by_name[hello["side"]].lines.append(talk)
            by_name[hello["side"]].losses = hello["losses"]


def rounds(sides: list[Side], seconds: float) -> None:
    """Turns for so long, of half a second at least.

    The first step of a turn is not counted: its ranks did not wake together, and caches are cold.
    """
    for one in sides:
        one.turn(2)
        one.steps.clear()
    ends = time.perf_counter() + seconds
    counts = [0] * len(sides)
    while time.perf_counter() < ends or min(counts) < 3:
        for number, one in enumerate(sides):
            took = one.turn(1)
            one.steps.pop()
            one.turn(max(1, int(_TURN_SECONDS / took)))
            counts[number] += 1


def measured(workload: str, seconds: float, peers: list[str]) -> dict[str, Any]:
    """The steps of every side of a workload."""
    ours, theirs = CASES[workload]
    sides = [
        Side(peer, variant, ranks)
        for peer, variants in ((OURS, ours), (THEIRS, theirs))
        if peer in peers
        for variant in variants
        for ranks in ((1,) if workload == "W7" else (1, 2))
    ]
    if workload in SHARED:
        sides.append(Side(OURS, ours[0], 2, SHARED[workload]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            started(workload, sides, folder)
            rounds(sides, seconds)
            for one in sides:
                for line in one.lines:
                    line.write("0\n")
                    line.flush()
                for process in one.processes:
                    process.wait(30)
    finally:
        for one in sides:
            for process in one.processes:
                process.kill()
    return {
        "workload": workload,
        "sides": [
            {"peer": s.peer, "variant": HALVES if s.shared else s.variant, "ranks": s.ranks,
             "losses": s.losses, "steps": s.steps} for s in sides
        ],
    }  # fmt: skip


# ---------------------------------------------------------------- the tables
Key = tuple[str, str, str, int]
"""Workload, peer, variant, ranks."""


@dataclass
class Found:
    """All steps of a side in several runs, and the first losses."""

    losses: list[float]
    steps: list[tuple[float, float]] = field(default_factory=list)

    def milliseconds(self, clock: int = 0) -> float:
        """The median of the steps: of wall time, or of CPU time."""
        return 1e3 * statistics.median(step[clock] for step in self.steps)


def tables(runs: list[dict[str, Any]]) -> str:
    """Medians of all steps of all runs: mpiflow beside PyTorch, and two ranks beside one."""
    found: dict[Key, Found] = {}
    for run in runs:
        for s in run["sides"]:
            key = run["workload"], s["peer"], s["variant"], s["ranks"]
            found.setdefault(key, Found(s["losses"])).steps.extend(s["steps"])
    return f"{against_peers(found)}\n\n{efficiencies(found)}"


def against_peers(found: dict[Key, Found]) -> str:
    """Each side of PyTorch with mpiflow's; a ratio above 1 says that mpiflow takes longer."""
    rows = [["workload", "PyTorch's variant", "ranks", "steps", "mpiflow ms", "PyTorch ms", "ratio",
             "CPU ms", "PyTorch's", "ratio", "losses differ by"]]  # fmt: skip
    for (workload, peer, variant, ranks), theirs in sorted(found.items()):
        own = variant if (workload, OURS, variant, ranks) in found else CASES[workload][0][0]
        if peer == OURS or (workload, OURS, own, ranks) not in found:
            continue
        mine = found[workload, OURS, own, ranks]
        cells = [workload, variant, str(ranks), f"{len(mine.steps)} / {len(theirs.steps)}"]
        for clock, shown in enumerate(("**{:.2f}**", "{:.2f}")):
            a, b = mine.milliseconds(clock), theirs.milliseconds(clock)
            cells += [f"{a:.1f}", f"{b:.1f}", shown.format(a / b)]
        gap = max(abs(a - b) / abs(b) for a, b in zip(mine.losses, theirs.losses, strict=True))
        rows.append([*cells, f"{gap:.0e}"])
    return _drawn(rows)


def efficiencies(found: dict[Key, Found]) -> str:
    """Half of the step on one rank over the step on two.

    And over the step of two jobs of one rank, each with half of the work: were messages free.
    """
    rows = [["workload", "who", "1 rank ms", "2 ranks ms", "two halves ms", "efficiency",
             "of two halves", "asked"]]  # fmt: skip
    for (workload, peer, variant, ranks), alone in sorted(found.items()):
        if ranks > 1 or (workload, peer, variant, 2) not in found:
            continue
        times = [alone.milliseconds(), found[workload, peer, variant, 2].milliseconds()]
        halves = found.get((workload, peer, HALVES, 2))
        times += [halves.milliseconds()] if halves else []
        shares = [f"{times[0] / 2 / time:.2f}" for time in times[1:]]
        rest = [""] * (3 - len(times))
        asked = str(ASKED.get(workload, "")) if peer == OURS else ""
        rows.append([workload, f"{peer} {variant}", *(f"{time:.1f}" for time in times), *rest,
                     *shares, *rest, asked])  # fmt: skip
    return _drawn(rows)


def _drawn(rows: list[list[str]]) -> str:
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workloads", nargs="*", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=8, help="of turns, for each workload")
    parser.add_argument("--only", nargs=1, choices=(OURS, THEIRS), default=[OURS, THEIRS],
                        help="measure this side alone")  # fmt: skip
    parser.add_argument("--add", default=os.devnull, help="a file that gets a line a workload")
    parser.add_argument("--table", metavar="FILE", help="only print the table of such a file")
    given = parser.parse_args()
    if given.table:
        print(tables([json.loads(line) for line in Path(given.table).read_text().splitlines()]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides end too
    made = []
    for workload in given.workloads or CASES:
        made.append(measured(workload, given.seconds, given.only))
        with open(given.add, "a") as file:
            file.write(json.dumps(made[-1]) + "\n")
    print(tables(made))


if __name__ == "__main__":
    if "BENCH_SCRIPT" in os.environ:
        side(os.environ["BENCH_SCRIPT"])
    else:
        main()
