"""Runs a kernel as the contract allows: whole, or as the shards of a signature joined again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from mpiflow.exec.bind import Shard
from mpiflow.graph import sbp
from mpiflow.graph.graph import Graph
from mpiflow.graph.op import OUT, Op
from mpiflow.graph.rule import Shape
from mpiflow.graph.sbp import Layout, Partial
from mpiflow.graph.tensor import Tensor

Array = Any
Place = tuple[int, ...]
Starts = dict[int | str, tuple[int, ...]]
GUARD = 64
POISON = 0xA5

shard_box = lru_cache(maxsize=10_000)(sbp.shard_box)
"""Small tests ask for the same boxes over and over."""


def require(holds: object, message: str) -> None:
    """AssertionError unless it holds."""
    if not holds:
        raise AssertionError(message)


def shapes_of(arrays: Sequence[Array]) -> tuple[Shape, ...]:
    """The shape of each array."""
    return tuple(array.shape for array in arrays)


def dtypes_of(arrays: Sequence[Array]) -> tuple[str, ...]:
    """The name of the dtype of each array."""
    return tuple(array.dtype.name for array in arrays)


def poisoned(shape: Shape, dtype: str) -> Array:
    """Memory whose old content shows: NaN for floats, a value nobody computes for others."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = POISON
    if array.dtype.kind == "f":
        array[...] = np.nan
    return array


def workspace(
    op: Op,
    inputs: tuple[Shape, ...],
    outputs: tuple[Shape, ...],
    dtype: str,
    *,
    on_device: bool = False,
) -> tuple[Array, Array]:
    """(the bytes that the kernel may use, those behind them)."""
    needed = op.device_workspace if on_device else op.workspace
    size = needed(inputs, outputs, dtype)
    memory = np.empty(size + 2 * GUARD, np.uint8)
    memory.fill(POISON)
    first = -memory.ctypes.data % GUARD
    return memory[first : first + size], memory[first + size :]


def call(
    op: Op,
    arrays: Sequence[Array],
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    *,
    starts: Starts | None = None,
    first: bool = True,
    outs: list[Array] | None = None,
) -> list[Array]:
    """The outputs of the kernel, which may use its workspace and change no input."""
    before = [array.tobytes() for array in arrays] if outs is None else []
    if outs is None:
        outs = [poisoned(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    work, guard = workspace(op, shapes_of(arrays), tuple(shapes), dtypes[0])
    if starts is None:
        starts = whole_starts(arrays, shapes)
    with np.errstate(all="ignore"):
        kernel(op, Shard(np, work, starts, first), outs, arrays)
    intact = guard.tobytes() == bytes([POISON]) * guard.size
    require(intact, f"{op.name} writes behind its workspace")
    for array, old in zip(arrays, before, strict=False):
        require(array.tobytes() == old, f"{op.name} changes an input")
    return outs


def kernel(op: Op, shard: Shard, outs: Sequence[Array], arrays: Sequence[Array]) -> None:
    """Run the kernel; AssertionError says on which shapes it fails."""
    run: Any = op.kernel
    try:
        given = run(shard, outs[0] if len(outs) == 1 else tuple(outs), *arrays)
    except Exception as error:
        raise AssertionError(
            f"{op.name}: the kernel on {shapes_of(arrays)} that fills {shapes_of(outs)} raises"
            f" {type(error).__name__}: {error}"
        ) from error
    require(
        given is None,
        f"{op.name}: the kernel gives something back; it writes `out`: out=out, or out[...] =",
    )


def whole_starts(arrays: Sequence[Array], shapes: Sequence[Shape]) -> Starts:
    """Where the arrays begin that are not split."""
    starts: Starts = {i: (0,) * array.ndim for i, array in enumerate(arrays)}
    starts[OUT] = (0,) * len(shapes[0])
    return starts


def whole(op: Op, arrays: Sequence[Array]) -> list[Array]:
    """The outputs on one rank, of the inferred shapes and dtypes."""
    return call(op, arrays, op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays)))


def parts(
    array: Array, layout: Layout, sizes: tuple[int, ...], draw: np.random.Generator
) -> dict[Place, Array]:
    """What each rank holds of `array`, by coordinates; partial parts are random."""
    axes = [i for i, s in enumerate(layout) if isinstance(s, Partial)]
    keys = list(product(*(range(sizes[i]) for i in axes)))
    shares = {}
    for key in keys:
        if array.dtype.kind == "f":
            shares[key] = draw.standard_normal(array.shape).astype(array.dtype)
        else:
            shares[key] = draw.integers(-5, 5, array.shape).astype(array.dtype)
    if axes and _reduction(layout, axes) == "max":
        holder = draw.integers(0, len(keys), array.shape)
        for i, key in enumerate(keys):
            shares[key] = np.where(holder == i, array, array - abs(shares[key]) - 1)
    elif axes:
        shares[keys[0]] = array - sum(shares[key] for key in keys[1:])
    else:
        shares[()] = array
    held = {}
    for where in product(*map(range, sizes)):
        box = shard_box(array.shape, layout, sizes, where)
        part = shares[tuple(where[i] for i in axes)][tuple(slice(a, b) for a, b in box)]
        held[where] = np.ascontiguousarray(part).reshape(part.shape)
    return held


def join(
    held: Mapping[Place, Array], shape: Shape, dtype: str, layout: Layout, sizes: tuple[int, ...]
) -> Array:
    """The whole that the parts mean; parts that should be equal are."""
    axes = [i for i, s in enumerate(layout) if isinstance(s, Partial)]
    sums: dict[Place, list[tuple[Any, Array]]] = {}
    for where, part in held.items():
        box = shard_box(shape, layout, sizes, where)
        require(part.shape == sbp.box_shape(box), "a part has another shape than its box")
        sums.setdefault(tuple(where[i] for i in axes), []).append((box, part))
    wholes = []
    for pieces in sums.values():
        joined = np.zeros(shape, dtype)
        seen = np.zeros(shape, bool)
        for box, part in pieces:
            place = tuple(slice(a, b) for a, b in box)
            replica = seen[place]
            require(np.array_equal(joined[place][replica], part[replica]), "replicas differ")
            joined[place], seen[place] = part, True
        require(seen.all(), "the parts leave some of the whole")
        wholes.append(joined)
    if axes and _reduction(layout, axes) == "max":
        return np.maximum.reduce(wholes)
    return sum(wholes[1:], wholes[0])


def _reduction(layout: Layout, axes: list[int]) -> str:
    first = layout[axes[0]]
    assert isinstance(first, Partial)
    return first.reduce


def sharded(
    op: Op,
    arrays: Sequence[Array],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    sizes: tuple[int, ...],
    seed: int = 0,
) -> list[Array]:
    """The outputs that the shards of one signature per mesh axis join to."""
    draw = np.random.default_rng(seed)
    shapes = op.infer(shapes_of(arrays))
    dtypes = op.dtypes(dtypes_of(arrays))
    held = [parts(a, layout, sizes, draw) for a, layout in zip(arrays, inputs, strict=True)]
    results: list[dict[Place, Array]] = [{} for _ in shapes]
    for where in product(*map(range, sizes)):
        boxes = [
            shard_box(s, layout, sizes, where) for s, layout in zip(shapes, outputs, strict=True)
        ]
        starts: Starts = {
            i: tuple(start for start, _ in shard_box(a.shape, layout, sizes, where))
            for i, (a, layout) in enumerate(zip(arrays, inputs, strict=True))
        }
        starts[OUT] = tuple(start for start, _ in boxes[0])
        local = [h[where] for h in held]
        outs = call(op, local, [sbp.box_shape(b) for b in boxes], dtypes, starts=starts)
        for result, out in zip(results, outs, strict=True):
            result[where] = out
    return [
        join(r, s, d, layout, sizes)
        for r, s, d, layout in zip(results, shapes, dtypes, outputs, strict=True)
    ]


def evaluate(graph: Graph, tensors: Sequence[Tensor], feeds: Mapping[Tensor, Array]) -> list[Array]:
    """The values of tensors of a graph: every kernel, unsharded, in order."""
    values = dict(feeds)
    for node in graph.nodes:
        arrays = [values[t] for t in node.inputs]
        shapes, dtypes = [t.shape for t in node.outputs], [t.dtype for t in node.outputs]
        outs = call(node.op, arrays, shapes, dtypes)
        values.update(zip(node.outputs, outs, strict=True))
    return [values[t] for t in tensors]
