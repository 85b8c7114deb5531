"""Runs a kernel as the contract allows: whole, or as the shards of a signature joined again."""

from itertools import product

import numpy as np

from mpiflow.exec.bind import Shard
from mpiflow.graph import sbp
from mpiflow.graph.op import OUT
from mpiflow.graph.sbp import Partial

GUARD = 64
POISON = 0xA5


def poisoned(shape, dtype):
    """Memory whose old content shows: NaN for floats, a value nobody computes for others."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = POISON
    if array.dtype.kind == "f":
        array[...] = np.nan
    return array


def workspace(op, inputs, outputs, dtype):
    """(the bytes that the kernel may use, those behind them)."""
    size = op.workspace(inputs, outputs, dtype)
    memory = np.full(size + 2 * GUARD, POISON, np.uint8)
    first = -memory.ctypes.data % GUARD
    return memory[first : first + size], memory[first + size :]


def call(op, arrays, shapes, dtypes, *, starts=None, first=True, outs=None):
    """The outputs of the kernel; workspace and inputs are checked afterwards."""
    if outs is None:
        outs = [poisoned(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        before = [a.copy() for a in arrays]
    else:
        before = None
    work, guard = workspace(op, tuple(a.shape for a in arrays), tuple(shapes), dtypes[0])
    if starts is None:
        starts = {i: (0,) * a.ndim for i, a in enumerate(arrays)}
        starts[OUT] = (0,) * len(shapes[0])
    shard = Shard(np, work, starts, first)
    with np.errstate(all="ignore"):
        op.kernel(shard, outs[0] if len(outs) == 1 else tuple(outs), *arrays)
    assert (guard == POISON).all(), f"{op.name} writes behind its workspace"
    for array, old in zip(arrays, before or (), strict=False):
        assert np.array_equal(array, old), f"{op.name} changes an input"
    return outs


def whole(op, arrays):
    """The outputs on one rank, of the inferred shapes and dtypes."""
    shapes = op.infer(tuple(a.shape for a in arrays))
    return call(op, arrays, shapes, op.dtypes(tuple(a.dtype.name for a in arrays)))


def parts(array, layout, sizes, draw):
    """What each rank holds of `array`, by coordinates; partial parts are random."""
    axes = [i for i, s in enumerate(layout) if isinstance(s, Partial)]
    keys = list(product(*(range(sizes[i]) for i in axes)))
    shares = {}
    for key in keys:
        if array.dtype.kind == "f":
            shares[key] = draw.standard_normal(array.shape).astype(array.dtype)
        else:
            shares[key] = draw.integers(-5, 5, array.shape).astype(array.dtype)
    if axes and layout[axes[0]].reduce == "max":
        holder = draw.integers(0, len(keys), array.shape)
        for i, key in enumerate(keys):
            shares[key] = np.where(holder == i, array, array - abs(shares[key]) - 1)
    elif axes:
        shares[keys[0]] = array - sum(shares[key] for key in keys[1:])
    else:
        shares[()] = array
    held = {}
    for where in product(*map(range, sizes)):
        box = sbp.shard_box(array.shape, layout, sizes, where)
        part = shares[tuple(where[i] for i in axes)][tuple(slice(a, b) for a, b in box)]
        held[where] = np.ascontiguousarray(part).reshape(part.shape)
    return held


def join(held, shape, dtype, layout, sizes):
    """The whole that the parts mean; parts that should be equal are."""
    axes = [i for i, s in enumerate(layout) if isinstance(s, Partial)]
    sums = {}
    for where, part in held.items():
        box = sbp.shard_box(shape, layout, sizes, where)
        assert part.shape == sbp.box_shape(box)
        sums.setdefault(tuple(where[i] for i in axes), []).append((box, part))
    wholes = []
    for pieces in sums.values():
        joined = np.zeros(shape, dtype)
        seen = np.zeros(shape, bool)
        for box, part in pieces:
            place = tuple(slice(a, b) for a, b in box)
            replica = seen[place]
            assert np.array_equal(joined[place][replica], part[replica]), "replicas differ"
            joined[place], seen[place] = part, True
        assert seen.all()
        wholes.append(joined)
    if axes and layout[axes[0]].reduce == "max":
        return np.maximum.reduce(wholes)
    return sum(wholes[1:], wholes[0])


def sharded(op, arrays, inputs, outputs, sizes, seed=0):
    """The outputs that the shards of one signature per mesh axis join to."""
    draw = np.random.default_rng(seed)
    shapes = op.infer(tuple(a.shape for a in arrays))
    dtypes = op.dtypes(tuple(a.dtype.name for a in arrays))
    held = [parts(a, layout, sizes, draw) for a, layout in zip(arrays, inputs, strict=True)]
    results = [{} for _ in shapes]
    for where in product(*map(range, sizes)):
        boxes = [sbp.shard_box(s, layout, sizes, where)
                 for s, layout in zip(shapes, outputs, strict=True)]  # fmt: skip
        starts = {i: tuple(start for start, _ in sbp.shard_box(a.shape, layout, sizes, where))
                  for i, (a, layout) in enumerate(zip(arrays, inputs, strict=True))}  # fmt: skip
        starts[OUT] = tuple(start for start, _ in boxes[0])
        local = call(op, [h[where] for h in held], [sbp.box_shape(b) for b in boxes], dtypes,
                     starts=starts)  # fmt: skip
        for result, out in zip(results, local, strict=True):
            result[where] = out
    return [
        join(r, s, d, layout, sizes)
        for r, s, d, layout in zip(results, shapes, dtypes, outputs, strict=True)
    ]


def evaluate(graph, tensors, feeds):
    """The values of tensors of a graph: every kernel, unsharded, in order."""
    values = dict(feeds)
    for node in graph.nodes:
        arrays = [values[t] for t in node.inputs]
        outs = call(node.op, arrays, [t.shape for t in node.outputs],
                    [t.dtype for t in node.outputs])  # fmt: skip
        values.update(zip(node.outputs, outs, strict=True))
    return [values[t] for t in tensors]
