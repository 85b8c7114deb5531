"""The logical graphs of a job: forward, and for training backward and updates, all checked."""

from __future__ import annotations

import hashlib

from mpiflow.compiler.arrange import Observer
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.precision import check_precision
from mpiflow.compiler.trace import take_rows, trace
from mpiflow.errors import JobError
from mpiflow.graph.check import check
from mpiflow.graph.graph import Graph
from mpiflow.job import Job
from mpiflow.plan.records import DataSet


class Graphs:
    """Makes the graphs of a job; what a user should know of training goes to `notes`."""

    def __init__(
        self, job: Job, data: dict[str, DataSet], observe: Observer, notes: list[str]
    ) -> None:
        self.job, self.data, self.observe, self.notes = job, data, observe, notes
        self.model = ""
        """The hash of what is computed forward in training, once that was traced."""

    def train(self) -> Graph:
        """The graph of a training step: forward, backward and updates, for the whole batch."""
        data = self.data["train"]
        graph = self.traced("train", data, data.batch, training=True)
        self.model = hashlib.sha256(str(graph).encode()).hexdigest()
        scaled = self.job.precision == "float16"
        self.notes += differentiate(graph, self.job.optimizer, scaled=scaled)
        self.observe("differentiate", "train", graph)
        check_precision(graph)
        self.observe("precision", "train", graph)
        return graph

    def traced(self, program: str, data: DataSet, rows: int, *, training: bool) -> Graph:
        """What the model computes of so many rows, without what nothing reads."""
        graph = trace(self.job, data, name=program, rows=rows, training=training)
        self.observe("trace", program, graph)
        by_row = take_rows(graph, rows)
        notes = check(graph)
        graph.drop_unread_inputs()
        self.observe("check", program, graph)
        if training:
            self.notes += notes
            self.notes += [
                f"output {name} has a value for each row: only `mpiflow predict` gives it"
                for name in by_row
            ]
        elif not graph.outputs:
            raise JobError(f"{program}: the model gives no scalar, such as mf.mean(x)")
        return graph
