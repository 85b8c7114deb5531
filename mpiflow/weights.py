"""Weights between the files of others and the variables of a plan.

with_first_values    when the plan is made: which tensors fill which variables
load_first           on every rank, when a new run begins
import_weights       a checkpoint of such a beginning, that a run can go on from
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.exec.bind import Shard
from mpiflow.graph.op import OUT, build_op
from mpiflow.graph.sbp import Box
from mpiflow.io.checkpoint import records, write
from mpiflow.io.weights.builtin import name_map
from mpiflow.io.weights.first import fill, fill_all, is_of_model, resolve, with_averages
from mpiflow.io.weights.names import NameMap
from mpiflow.io.weights.source import open_tensors
from mpiflow.io.weights.tensors import TensorInfo, Tensors
from mpiflow.job import Weights
from mpiflow.ops.attention import SplitHeads
from mpiflow.plan import store
from mpiflow.plan.first import Filled, FirstValues
from mpiflow.plan.records import Plan, Task, Variable

_BLOCK_BYTES = 32 << 20


def with_first_values(plan: Plan, weights: Weights, folder: Path) -> Plan:
    """The plan of runs that begin with these weights; which they are is part of its identity."""
    with open_tensors(folder / weights.path) as source:
        filled, remarks = resolve_weights(plan, source, weights, folder)
        digest = source.digest()
    text = hashlib.sha256(repr(filled).encode()).hexdigest()
    remarks = [f"{weights.path}: {remark}" for remark in remarks]
    begins = f"a new run begins with {weights.path}, which fills {len(filled)} variables"
    return replace(
        plan,
        first=FirstValues(weights.path, digest, filled),
        identity=(*plan.identity, ("init", f"weights {digest}, names {text}")),
        notes=(*plan.notes, begins, *remarks),
    )


def resolve_weights(
    plan: Plan, source: Tensors, weights: Weights, folder: Path
) -> tuple[tuple[Filled, ...], list[str]]:
    """What fills the variables of a plan, averages included, and remarks."""
    names = [v.name for v in plan.distinct_variables()]
    wanted = [TensorInfo(v.name, v.shape, v.dtype) for v in plan.distinct_variables()]
    mapped = name_map(weights.names, folder)
    check_heads(plan, mapped)
    filled, remarks = resolve(
        source,
        mapped,
        [info for info in wanted if is_of_model(info.name, names)],
        without=weights.without,
        ignore=weights.ignore,
    )
    return with_averages(filled, names), remarks


def check_heads(plan: Plan, names: NameMap) -> None:
    """CheckpointError where a map is for other attention heads, which no shape would tell."""
    found = {
        task.attributes["groups_of_heads"]
        for program in plan.programs
        for task in program.tasks
        if task.op == SplitHeads.__name__
    }
    if names.heads and found and names.heads not in found:
        raise CheckpointError(
            f"names {names.name}: for {names.heads} heads, the model of {plan.job} has"
            f" {' or '.join(map(str, sorted(found)))}"
        )


def check_first(first: FirstValues, folder: Path) -> None:
    """CheckpointError unless the file of weights is the one that the plan was made with."""
    with open_tensors(folder / first.path) as source:
        found = source.digest()
    if found != first.digest:
        raise CheckpointError(
            f"{folder / first.path}: the plan was made with other weights (digest {first.digest},"
            f" now {found}); restore the file or make the plan again"
        )


def load_first(
    first: FirstValues, folder: Path, boxes: Mapping[str, Box], arrays: Mapping[str, np.ndarray]
) -> None:
    """Fill the arrays of the variables, of which each is the part `boxes`, from the file."""
    with open_tensors(folder / first.path) as source:
        fill_all(source, first.filled, boxes, arrays)


def import_weights(plan: Plan, weights: Weights, out: Path, folder: Path) -> tuple[Path, list[str]]:
    """Write a checkpoint of step 0 into the run folder `out`; gives its path, and remarks.

    Variables that the weights do not fill begin as in a new run. No more than a block of one
    variable is in memory at a time. The plan is that of one rank.
    """
    checkpoints = out / "checkpoints"
    if records.scan(checkpoints):
        raise CheckpointError(f"{checkpoints}: has checkpoints already; choose another folder")
    header = write.header(
        plan,
        digest=store.digest(plan),
        program=store.program_digest(plan),
        step=0,
        epoch=0,
        state={"best": None, "best_step": 0, "since_best": 0},
    )
    with open_tensors(folder / weights.path) as source:
        filled, remarks = resolve_weights(plan, source, weights, folder)
        write.prepare(checkpoints, 0)
        writer = write.CheckpointWriter(checkpoints, 0, 0, "here")
        by_name = {one.variable: one for one in filled}
        starts = _starts(plan)
        for variable in plan.distinct_variables():
            for box in _blocks(variable):
                array = np.empty([b - a for a, b in box], variable.dtype)
                if variable.name in by_name:
                    fill(source, by_name[variable.name], box, array)
                else:
                    _initialise(starts[variable.name], box, array)
                writer.write(variable.name, tuple(start for start, _ in box), array)
        writer.finish()
    return write.commit(checkpoints, header, 1), remarks


def _starts(plan: Plan) -> dict[str, Task]:
    program = plan.program("initialise")
    return {task.outputs[0]: task for task in (program.tasks if program else ())}


def _blocks(variable: Variable) -> list[Box]:
    """Boxes of some rows each that make up a variable."""
    if not variable.shape:
        return [()]
    rows, *rest = variable.shape
    row_bytes = variable.nbytes // max(1, rows) or 1
    count = max(1, _BLOCK_BYTES // row_bytes)
    inner = tuple((0, size) for size in rest)
    return [((at, min(at + count, rows)), *inner) for at in range(0, rows, count)]


def _initialise(task: Task, box: Box, out: np.ndarray) -> None:
    op = build_op(task.op, task.attributes)
    if out.size:
        op.kernel(Shard(np, None, {OUT: tuple(start for start, _ in box)}, True), out)
