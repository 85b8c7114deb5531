"""What to say where no layouts fit: what stands in the way, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpiflow.compiler.arrange import Target, relative_line
from mpiflow.compiler.budget import Held, budget
from mpiflow.compiler.domains import Domains
from mpiflow.compiler.fit import Intervals, TooLarge
from mpiflow.compiler.microbatch import divide
from mpiflow.compiler.recompute import NONE, SELECTIVE
from mpiflow.compiler.signature import pose
from mpiflow.compiler.zero import split_variables
from mpiflow.errors import CompileError, MpiflowError
from mpiflow.graph.graph import Graph
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import layout_text
from mpiflow.job import Job
from mpiflow.plan.text import size_text

_SHOWN = 8
"""The largest tensors that are named."""
_TRIED = (2, 4, 8, 16, 32)
"""How many times the micro-batches, or the ranks, that are looked at."""


def does_not_fit(
    error: TooLarge, target: Target, job: Job, graph: Graph, folder: Path
) -> CompileError:
    """The error for the user: limit, the least that was found, its peak, and what would help."""
    limit, node = target.memory, error.peak
    least = f"of all layouts that were found the smallest hold {size_text(round(error.least))}"
    if error.least <= limit:  # which plans exceed, by what they need besides
        least = "no layouts were found that fit, though there may be some"
        if error.arena:
            least = f"of the plans that were made the smallest needs {size_text(error.arena)}"
    lines = [
        f"{job.name} does not fit {size_text(limit)} a rank on mesh {target.mesh}: {least}",
        f"  most is held at {node.name}  {relative_line(node.where, folder)}",
    ]
    lines += _largest(error, folder)
    help_ = [*_micro_batches(target, job, graph), *_ranks(target, job, graph)]
    if target.zero in (0, 1, 2):
        help_.append(f"no --zero {target.zero}, so that weights too may be split over data")
    if target.recompute in (NONE, SELECTIVE):
        help_.append("--recompute auto, to keep fewer activations")
    help_.append("a smaller batch, or a larger --memory")
    lines.append(f"  what would help: {'; '.join(help_)}")
    return CompileError("\n".join(lines))


def _largest(error: TooLarge, folder: Path) -> list[str]:
    """A line for each of the largest tensors, one for all others."""
    rows = [(size_text(round(n)), *_tensor(held, error, folder)) for held, n in error.kept[:_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "    " + "  ".join(
            text.rjust(width) if i == 0 else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip
    rest = error.kept[_SHOWN:]
    if rest:
        total = size_text(round(sum(n for _, n in rest)))
        lines.append(f"    and {len(rest):,} more that hold {total}")
    return lines


def _tensor(held: Held, error: TooLarge, folder: Path) -> tuple[str, str, str, str]:
    """Name, layout, shape and what it is, with the user's line."""
    tensor = held.tensor
    shape = f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"
    name = tensor.name if held.what == "tensor" else f"{tensor.name} ({held.what})"
    line = relative_line(tensor.where, folder)
    return name, layout_text(held.layout(error.choice)), shape, line.rpartition("/")[2]


def _micro_batches(target: Target, job: Job, graph: Graph) -> Iterator[str]:
    """The fewest micro-batches that may fit."""
    for times in _TRIED:
        count = job.micro_batches * times
        if job.train.batch % count:
            return
        least = _least(target, graph, target.mesh, count)
        if least is not None and least <= target.memory:
            yield f"--micro-batches {count} ({size_text(least)} or more)"
            return


def _ranks(target: Target, job: Job, graph: Graph) -> Iterator[str]:
    """The fewest ranks that may fit, more of them on the first axis."""
    if target.mesh.by_stage:
        return
    (name, size), *others = target.mesh.axes
    for times in _TRIED:
        mesh = Mesh(((name, size * times), *others))
        least = _least(target, graph, mesh, job.micro_batches)
        if least is not None and least <= target.memory:
            yield f"{mesh.size} ranks, {name}={size * times} ({size_text(least)} or more)"
            return


def _least(target: Target, graph: Graph, mesh: Mesh, micro_batches: int) -> int | None:
    """What a rank holds at least, each tensor in its smallest layout; None where there is no plan.

    What the layouts cost, and whether they go together, is not looked at.
    """
    timed = mesh.in_time(micro_batches)
    split, free = split_variables(graph, target.zero or 0), set[str]()
    if target.zero is None:
        free = split_variables(graph, 3)
    try:
        timing = divide(graph, micro_batches) if timed.timed else None
        problem = pose(Domains(graph, timed, None, timing, split, free), target.machine)
    except MpiflowError:
        return None  # this many cannot be had
    held = budget(problem, scatter=True, again=not timed.timed)
    each = np.array([h.nbytes.min() for h in held.held])
    return int(Intervals(held).used(each).max())
