"""What a step costs whose tables are updated by rows, and as a whole, by the size of the table.

    python benchmarks/sparse_tables.py [STEPS]

A step looks up 4096 ids in a table of 16 columns and takes a step of Adam, on one rank. The medians
of STEPS steps are printed; the tables of the whole update end at a million rows.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.exec.local import run_local
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import DataSet, Field

IDS, WIDTH = 4096, 16


class Ids:
    """A reader of random ids below `rows`, anew in each step."""

    reading = ""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def read(self, step, rows, out):
        draw = np.random.default_rng(step)
        out["id"][...] = draw.integers(0, self.rows, out["id"].shape)

    def describe(self, step, row):
        return f"row {row}"


def seconds(rows: int, sparse: bool, steps: int) -> float:
    def model(batch):
        table = nn.Embedding(rows, WIDTH, name="table", sparse=sparse)
        return {"loss": mf.mean(mf.square(table(batch["id"])))}

    job = mf.Job("tables", model, train=mf.Dataset("none", batch=IDS), optimizer=mf.Adam(0.01))
    fields = (Field("id", (), "int64"),)
    data = {"train": DataSet("train", "none", fields, (), 10**9, IDS, False, 0, 1, 1, "")}
    plan = compile_job(job, data, Target(Mesh((("data", 1),)), find_machine("cpu")))

    def measure(transport) -> float:
        session = Session(plan, transport, {"train": Ids(rows)})
        session.run("initialise")
        session.expect("train", range(steps))
        times = []
        for step in range(steps):
            began = time.perf_counter()
            session.run("train", step)
            times.append(time.perf_counter() - began)
        session.close()
        return statistics.median(times)

    return run_local(1, measure)[0]


def main(steps: int) -> None:
    print(f"{'rows':>12}  {'by rows':>10}  {'as a whole':>10}")
    for rows in (10_000, 100_000, 1_000_000, 4_000_000):
        found = [f"{seconds(rows, True, steps) * 1e3:7.2f} ms"]
        if rows <= 1_000_000:
            found.append(f"{seconds(rows, False, min(steps, 10)) * 1e3:7.2f} ms")
        print(f"{rows:>12,}  " + "  ".join(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
