"""How long planning takes, and how much memory: large models, by step of the compiler.

    python benchmarks/plan_speed.py [NAME ...]

Each model is planned in a process of its own, measured from its start, imports included, to
its end, when the plan is printed and written too. Seconds are CPU seconds; `other` is imports, the
proof against the ops, and writing. Without names, all models but the largest, `gpt-70b`.

Measured on a busy 2-core virtual machine with Python 3.11, November 2026:

    model      mesh                    nodes  tasks  seconds   MB   most of it
    bert-large data=64                  2102   5090     5.0    66   memory 0.9, lower 0.8
    bert-base  data=8,model=4           1310   3011     5.4    67   signatures 2.3
    bert-tiny  data=2,model=2            308    879     2.2    69   signatures 0.7
    gpt-small  data=64                   954   2396     2.3    56   signatures 0.4
    gpt-tiny   data=2,model=2,more=2     230    691     4.6   117   signatures 3.2
    resnet50   data=64                   872   2375     2.3    57   signatures 0.5
    gpt-70b    data=64,model=8          5798  13292    28.7   194   signatures 12.9, memory 4.3
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODELS = {
    "bert-large": ("bert.py", "data=64", ["size=large"]),
    "bert-base": ("bert.py", "data=8,model=4", ["size=base"]),
    "bert-tiny": ("bert.py", "data=2,model=2", []),
    "gpt-small": ("gpt.py", "data=64", ["size=small"]),
    "gpt-tiny": ("gpt.py", "data=2,model=2,more=2", []),
    "resnet50": ("images.py", "data=64", ["model=resnet50", "size=224", "channels=3",
                                          "classes=1000"]),
    "gpt-70b": ("gpt.py", "data=64,model=8", ["size=70b"]),
}  # fmt: skip
STEPS = ("trace", "differentiate", "signatures", "lower", "bucket", "schedule", "memory", "price",
         "verify", "other")  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    """What planning one model takes: figures of the child process that does it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", name, folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def child(name: str, folder: str) -> None:
    """Plan one model and print its figures."""
    from mpiflow.graph.mesh import parse_mesh
    from mpiflow.jobfile import load_job
    from mpiflow.plan import store, text
    from mpiflow.plan.records import Plan
    from mpiflow.planning import make_plan

    file, mesh, settings = MODELS[name]
    seconds: defaultdict[str, float] = defaultdict(float)
    last = time.process_time()

    def observe(step: str, program: str, result: object) -> None:
        nonlocal last
        now = time.process_time()
        seconds[step if step in STEPS else "lower" if step == "fuse" else "trace"] += now - last
        last = now

    job, home = load_job(str(EXAMPLES / file), settings)
    last = time.process_time()
    plan: Plan = make_plan(job, home, parse_mesh(mesh), Path(folder), observe=observe)
    store.save(plan, Path(folder) / "a.plan")
    text.show(plan)
    total = time.process_time()
    seconds["other"] = total - sum(seconds.values())
    train = plan.program("train")
    figures = {
        "ranks": plan.mesh.size,
        "nodes": sum(task.kind == "compute" for task in train.tasks) if train else 0,
        "tasks": sum(len(program.tasks) for program in plan.programs),
        "plan": os.path.getsize(Path(folder) / "a.plan"),
        "seconds": total,
        "steps": seconds,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(figures))


def main(names: list[str]) -> None:
    """Measure and print a row a model."""
    print(
        f"{'model':11}{'mesh':23}{'nodes':>6}{'tasks':>7}{'MB plan':>8}{'MB':>5}{'s':>7}  ", end=""
    )
    print("".join(f"{step[:9]:>10}" for step in STEPS))
    for name in names:
        figures = measured(name)
        steps = "".join(f"{figures['steps'].get(step, 0.0):10.2f}" for step in STEPS)
        print(
            f"{name:11}{MODELS[name][1]:23}{figures['nodes']:6}{figures['tasks']:7}"
            f"{figures['plan'] / 1e6:8.1f}{figures['memory'] / 1e6:5.0f}{figures['seconds']:7.2f}  "
            f"{steps}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main(sys.argv[1:] or [name for name in MODELS if name != "gpt-70b"])
