"""Evaluation: the steps that evaluate a model, with its variables where training has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mpiflow.compiler.arrange import Observer, Target
from mpiflow.compiler.budget import Share
from mpiflow.compiler.fit import Limit
from mpiflow.compiler.microbatch import Timing, divide
from mpiflow.compiler.parts import Step, make_step
from mpiflow.compiler.pipeline import stream_count
from mpiflow.compiler.signature import Placed, choose
from mpiflow.compiler.stages import Stages, assign_like
from mpiflow.errors import CompileError, JobError
from mpiflow.graph.graph import Graph
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout
from mpiflow.job import Job
from mpiflow.optim import average_name
from mpiflow.plan.records import DataSet, Variable


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Makes the steps of a job's evaluations.

    `traced` gives the graph of a program for so many rows of a data set, `shares` what each of the
    stages that have a mesh has to hold. What the user is to know is added to `notes`.
    """

    job: Job
    data: dict[str, DataSet]
    target: Target
    traced: Callable[[str, DataSet, int], Graph]
    shares: Callable[[Stages | None, Mesh], tuple[Share, ...]]
    observe: Observer
    notes: list[str]

    def steps(
        self,
        name: str,
        train: Step,
        variables: list[dict[str, Variable]],
        limit: Limit | None,
    ) -> list[Step]:
        """A step for the full batches of an evaluation, one for the rows that are left.

        `variables` are those of training, as each stage has them.
        """
        data = self.data[name]
        base = evaluation_program(name)
        tail = data.rows % data.batch
        kept = {
            mesh: {name: v.layout for name, v in averages(self.job, mine).items()}
            for mesh, mine in zip(self.target.inside, variables, strict=True)
        }
        sizes = [(base, data.batch)] if data.rows >= data.batch else []
        sizes += [(f"{base}_tail", tail)] if tail else []
        steps = []
        for program, rows in sizes:
            graph = self.traced(program, data, rows)
            _same_variables(graph, variables[0])
            timing = self._timing(graph, rows)
            self.observe("micro-batches", program, timing or f"one micro-batch of {rows} rows")
            stages = train.stages and assign_like(graph, train.stages)
            layouts = self.target.on_each(partial(self._placed, graph, timing, limit, kept, stages))
            steps.append(make_step(layouts, name, rows, self.target, timing, stages, forward=True))
        return steps

    def _placed(
        self,
        graph: Graph,
        timing: Timing | None,
        limit: Limit | None,
        kept: dict[Mesh, dict[str, Layout]],
        stages: Stages | None,
        inside: Mesh,
    ) -> Placed:
        """The layouts of an evaluation on the ranks of a stage; variables are in those `kept`."""
        mesh = inside.in_time(timing.micro_batches if timing else 1)
        fixed = {name: (B,) * mesh.timed + layout for name, layout in kept[inside].items()}
        if limit is not None:
            limit = replace(limit, shares=self.shares(stages, inside))
        placed = choose(graph, mesh, self.target.machine, fixed, timing=timing, limit=limit)
        self.observe("signatures", graph.name, placed)
        return placed

    def _timing(self, graph: Graph, rows: int) -> Timing | None:
        """With pipeline stages, evaluations are cut as training is, or as nearly as rows allow."""
        count = stream_count(self.target.mesh, rows, self.job.micro_batches)
        if count == 1:
            return None
        try:
            return divide(graph, count)
        except CompileError as error:
            why = str(error).partition("\n")[0]
            self.notes.append(
                f"{graph.name} is not cut into micro-batches, so its stages wait for one another:"
                f" {why}"
            )
            return None


def averages(job: Job, variables: dict[str, Variable]) -> dict[str, Variable]:
    """What an evaluation uses for each variable: its average, where the optimizer has one."""
    if not job.optimizer.ema:
        return variables
    return {
        name: variables.get(average_name(name), v) if v.trainable else v
        for name, v in variables.items()
    }


def evaluation_program(name: str) -> str:
    """The program that evaluates a data set; "_tail" is added for its last rows."""
    return "evaluate" if name == "evaluate" else f"evaluate.{name}"


def _same_variables(graph: Graph, variables: dict[str, Variable]) -> None:
    for name, variable in graph.variables.items():
        trained = variables.get(name)
        tensor = variable.tensor
        if trained is None:
            raise JobError(
                f"{graph.name} makes variable {name!r}, which training does not have; names must"
                f" be the same in both traces\n  {tensor.where}"
            )
        if (trained.shape, trained.dtype) != (tensor.shape, tensor.dtype):
            raise JobError(
                f"variable {name!r} is {trained.dtype}{list(trained.shape)} in training and"
                f" {tensor.dtype}{list(tensor.shape)} in {graph.name}\n  {tensor.where}"
            )
    if graph.assigns:
        raise JobError(f"{graph.name} assigns {next(iter(graph.assigns))}; only training may")
