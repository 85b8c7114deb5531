"""Step 1: call the model function on symbolic inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from mpiflow.compiler.precision import FULL, Mixed
from mpiflow.errors import JobError
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.tensor import Tensor
from mpiflow.job import Job
from mpiflow.plan.records import DataSet


class Batch(Mapping[str, Tensor]):
    """The fields of a batch; a field becomes an input of the graph when the model asks for it."""

    def __init__(self, graph: Graph, data: DataSet, rows: int) -> None:
        self._graph, self._data, self._rows = graph, data, rows
        self._fields = {field.name: field for field in data.fields}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._fields:
            raise JobError(
                f"the model asks for field {name!r}; {self._data.pattern} has"
                f" {', '.join(self._fields)}\n  {self._graph.where}"
            )
        if name not in self._graph.inputs:
            field = self._fields[name]
            self._graph.input(name, (self._rows, *field.shape), field.dtype)
        return self._graph.inputs[name]

    def __iter__(self) -> Any:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def trace(job: Job, data: DataSet, *, name: str, rows: int, training: bool) -> Graph:
    """The graph of one step on `rows` rows; variables are shared between traces by name."""
    policy = None if job.precision == FULL else Mixed(job.precision)
    graph = Graph(name, training=training, seed=job.seed, policy=policy)
    graph.micro_batches = job.micro_batches if training else 1
    with building(graph):
        outputs = job.model(Batch(graph, data, rows))  # type: ignore[arg-type]
    if not isinstance(outputs, Mapping) or not outputs:
        raise JobError(
            f"job {job.name}: the model function returns a dict of named scalars, not {outputs!r}"
        )
    for key, tensor in outputs.items():
        if not isinstance(tensor, Tensor) or tensor.graph is not graph:
            raise JobError(f"job {job.name}: output {key!r} is {tensor!r}, not a tensor of it")
        if key in RESERVED:
            raise JobError(f"job {job.name}: an output cannot be named {key!r}; metrics use it")
        graph.outputs[str(key)] = tensor
        if tensor.name in graph.totals:
            graph.totals.add(str(key))
    if training:
        _freeze(graph, job)
    return graph


def _freeze(graph: Graph, job: Job) -> None:
    """Let variables that the job names be as they are: not trained, and not assigned."""
    for pattern in job.frozen:
        names = [name for name in graph.variables if fnmatchcase(name, pattern)]
        if not names:
            raise JobError(
                f"job {job.name}: frozen {pattern!r} fits no variable; there are"
                f" {', '.join(graph.variables)}"
            )
        for name in names:
            graph.variables[name] = replace(graph.variables[name], trainable=False)
            graph.assigns.pop(name, None)


def take_rows(graph: Graph, rows: int) -> dict[str, Tensor]:
    """Take the outputs that have an element for each row of the batch out of the graph's outputs.

    `predict` gives them; a step of training or evaluation has scalars.
    """
    found = {
        name: tensor
        for name, tensor in graph.outputs.items()
        if tensor.shape[:1] == (rows,) and name != "loss"
    }
    for name in found:
        del graph.outputs[name]
    return found


RESERVED = ("step", "epoch", "seconds", "evaluation", "rows", "peak_bytes", "bytes_sent")
