"""Checks of ops, for tests: what mpiflow holds its own ops to, for those of a user's too.

    from mpiflow.testing import check_op

    def test_swish():
        check_op(Swish(beta=1.5), np.random.randn(5, 3))

Take small arrays of float64 with odd sizes: gradients are compared with differences, and dims are
divided among up to six ranks, some of which get nothing.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from mpiflow.compiler.boxing import is_legal
from mpiflow.errors import GraphError
from mpiflow.exec.bind import Shard
from mpiflow.graph import sbp
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import REGISTRY, Op, build_op
from mpiflow.graph.rule import Shape, Signature
from mpiflow.graph.sbp import Layout
from mpiflow.graph.tensor import is_float
from mpiflow.ops import multiply, reduce_sum
from mpiflow.testing.kernels import (
    Array,
    call,
    dtypes_of,
    evaluate,
    kernel,
    poisoned,
    require,
    shapes_of,
    sharded,
    whole,
    whole_starts,
    workspace,
)

__all__ = ["check_memory", "check_op"]

BUFFERS = 270_000
"""Bytes: NumPy casts and broadcasts through a buffer of 8192 elements an operand at most."""


def check_op(op: Op, *arrays: Array, gradient: bool = True) -> None:
    """AssertionError unless the op does with these inputs what its declaration says.

    The kernel writes all of `out`, in its workspace, and changes no input; every signature, on one
    and on two mesh axes, joins to the whole; the gradient agrees with differences; costs fit; more
    rows take no memory. `gradient=False` for ops without one.
    """
    arrays = tuple(np.asarray(array) for array in arrays)
    check_registered(op)
    check_writes(op, arrays)
    check_costs(op, arrays)
    for sizes in ((1,), (2,), (3,), (6,), (2, 2), (2, 3)):
        check_signatures(op, arrays, sizes)
    check_shard_costs(op, arrays)
    check_in_place(op, arrays)
    if gradient:
        check_gradients(op, arrays)
    if len(larger := stretch(arrays)) and _fits(op, larger):
        check_memory(op, *larger)


def check_registered(op: Op) -> None:
    """The op survives the way into a plan and back."""
    require(
        REGISTRY.get(op.name) is type(op),
        f"{op.name} is not registered as it is now; decorate its class with @mf.op",
    )
    again = build_op(op.name, op.attributes())
    require(again == op, f"{op.name}: {op} comes back from a plan as {again}")


def check_writes(op: Op, arrays: Sequence[Array]) -> None:
    """The outputs come as NaN or a byte pattern, then as ones; they agree if all is written."""
    first = whole(op, arrays)
    shapes, dtypes = op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays))
    again = [np.full(s, 1, d) for s, d in zip(shapes, dtypes, strict=True)]
    call(op, [array.copy() for array in arrays], shapes, dtypes, outs=again)
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        complete = not (a.dtype.kind == "f" and np.isnan(a).any())
        require(
            complete and np.array_equal(a, b),
            f"{op.name}: output {i} depends on what was in `out` before, or has NaN; write all of"
            " it: out=out, or out[...] =",
        )


def check_costs(op: Op, arrays: Sequence[Array]) -> None:
    """The cost is positive."""
    flops = op.flops(shapes_of(arrays), op.infer(shapes_of(arrays)))
    require(flops > 0, f"{op.name}: flops are {flops}")


def check_signatures(op: Op, arrays: Sequence[Array], sizes: tuple[int, ...]) -> None:
    """Shards by any signatures, one for each axis of a mesh, join to the whole.

    On several axes none keeps everything whole: that is the same as a mesh without its axis.
    """
    expected = whole(op, arrays)
    signatures = op.signatures(shapes_of(arrays), dtypes_of(arrays))
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
    shapes = (*shapes_of(arrays), *shapes_of(expected))
    if len(sizes) > 1:
        signatures = tuple(s for s in signatures if {*s.inputs, *s.outputs} != {sbp.B})
    for chosen in product(signatures, repeat=len(sizes)):
        inputs, outputs = _layouts(chosen, len(arrays))
        pairs = zip((*inputs, *outputs), shapes, strict=True)
        if not all(is_legal(layout, shape, mesh) for layout, shape in pairs):
            continue
        try:
            joined = sharded(op, arrays, inputs, outputs, sizes)
            for a, b in zip(joined, expected, strict=True):
                _close(a, b, arrays)
        except AssertionError as error:
            by = " | ".join(map(str, chosen))
            raise AssertionError(f"{op.name} on {sizes} parts by {by}: {error}") from error


def _layouts(chosen: tuple[Signature, ...], inputs: int) -> tuple[list[Layout], list[Layout]]:
    """Layouts of inputs and outputs for one signature per mesh axis."""
    return (
        [tuple(s.inputs[i] for s in chosen) for i in range(inputs)],
        [tuple(s.outputs[i] for s in chosen) for i in range(len(chosen[0].outputs))],
    )


def _close(actual: Array, expected: Array, arrays: Sequence[Array]) -> None:
    """Equal, up to the rounding of the narrowest floating-point array."""
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected)
    elif not np.array_equal(actual, expected):
        narrow = any(a.dtype == np.float32 for a in (*arrays, expected))
        tolerance = 1e-5 if narrow else 1e-9
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def check_shard_costs(op: Op, arrays: Sequence[Array]) -> None:
    """No shard costs more than the whole, nor needs more workspace."""
    ins, outs = shapes_of(arrays), op.infer(shapes_of(arrays))
    for signature in op.signatures(ins, dtypes_of(arrays)):
        sbps = signature.inputs + signature.outputs
        for place in ((0,), (5,)):  # the largest shard of six, and the smallest
            local = tuple(
                sbp.box_shape(sbp.shard_box(shape, (s,), (6,), place))
                for shape, s in zip(ins + outs, sbps, strict=True)
            )
            local_ins, local_outs = local[: len(ins)], local[len(ins) :]
            flops, most = op.flops(local_ins, local_outs), op.flops(ins, outs)
            require(0 <= flops <= most, f"{op.name} by {signature}: flops {flops}, whole {most}")
            needed = op.workspace(local_ins, local_outs, "float64")
            most = op.workspace(ins, outs, "float64")
            require(
                0 <= needed <= most,
                f"{op.name} by {signature}: workspace {needed}, whole {most}",
            )


def check_gradients(op: Op, arrays: Sequence[Array]) -> None:
    """The gradient of a random sum of the outputs agrees with central differences."""
    graph = Graph("test")
    with building(graph):
        tensors = [graph.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
        outputs = graph.add(op, *tensors)
        weights = [graph.input(f"weight{i}", y.shape, y.dtype) for i, y in enumerate(outputs)]
        terms = [reduce_sum(multiply(*pair)) for pair in zip(outputs, weights, strict=True)]
        loss = sum(terms[1:], terms[0])
        found = gradients(graph, loss, tensors)
    draw = np.random.default_rng(3)
    factors = [np.asarray(draw.standard_normal(weight.shape)) for weight in weights]
    feeds = dict(zip((*tensors, *weights), (*arrays, *factors), strict=True))
    actual = iter(evaluate(graph, [gradient for gradient in found if gradient is not None], feeds))
    for i, (tensor, gradient) in enumerate(zip(tensors, found, strict=True)):
        what = f"{op.name}: the gradient of input {i}"
        if gradient is None:
            none = not is_float(tensor.dtype) or op.name == "StopGradient"
            require(none, f"{what} is None; it is of {tensor.dtype}")
            continue
        same = (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        require(same, f"{what} is {gradient}, the input {tensor}")
        value = next(actual)
        along = directions(tensor.shape)
        slopes = [float(np.sum(value * direction)) for direction in along]
        expected = central_differences(op, arrays, factors, i, along)
        np.testing.assert_allclose(slopes, expected, rtol=1e-6, atol=1e-7, err_msg=what)


def directions(shape: Shape, single: int = 4, mixed: int = 4) -> list[Array]:
    """Unit vectors: one for each element if these are few, else some, and some that mix them all.

    An element with a wrong gradient shows in every mixture.
    """
    size = prod(shape)
    if size <= single + mixed:
        return list(np.eye(size).reshape(size, *shape))
    draw = np.random.default_rng(size)
    found = np.zeros((single + mixed, size))
    found[range(single), draw.choice(size, single, replace=False)] = 1.0
    found[single:] = draw.standard_normal((mixed, size))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return list(found.reshape(-1, *shape))


def central_differences(
    op: Op,
    arrays: Sequence[Array],
    factors: Sequence[Array],
    index: int,
    along: Sequence[Array],
    step: float = 1e-5,
) -> list[float]:
    """How the sum of outputs times factors changes along directions of an input of float64."""
    shapes, dtypes = op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays))
    moved = list(arrays)

    def total(change: Array) -> float:
        moved[index] = np.asarray(arrays[index] + change)
        outs = call(op, moved, shapes, dtypes)
        return sum(float(np.sum(y * factor)) for y, factor in zip(outs, factors, strict=True))

    return [(total(step * a) - total(-step * a)) / (2 * step) for a in along]


def check_in_place(op: Op, arrays: Sequence[Array]) -> None:
    """Outputs may lie on the inputs that the op declares, one at a time and all together."""
    expected = whole(op, arrays)
    shapes, dtypes = op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays))

    def check(pairs: Sequence[tuple[int, int]]) -> None:
        inputs = [array.copy() for array in arrays]
        outs = [poisoned(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        for i, j in pairs:
            outs[j] = inputs[i].reshape(shapes[j])
        call(op, inputs, shapes, dtypes, outs=outs)
        for a, b in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{op.name} in place, by {pairs}")

    # The compiler lets only equal shapes and dtypes share memory, or views.
    alike = [
        (i, j)
        for i, j in op.inplace
        if (op.view or arrays[i].shape == shapes[j]) and arrays[i].dtype.name == dtypes[j]
    ]
    for pair in alike:
        check([pair])
    if len(shapes) > 1 and len(alike) > 1:  # as an update has them
        check([(i, j) for j, i in {j: i for i, j in alike}.items()])


def check_memory(op: Op, *arrays: Array) -> None:
    """A second call of the kernel, on arrays of 400 KB or more, allocates next to nothing."""
    shapes, dtypes = op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays))
    outs = [poisoned(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    work, _ = workspace(op, shapes_of(arrays), shapes, dtypes[0])
    shard = Shard(np, work, whole_starts(arrays, shapes), True)
    kernel(op, shard, outs, arrays)
    tracemalloc.start()
    try:
        kernel(op, shard, outs, arrays)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest = 8 * max(map(prod, (*shapes_of(arrays), *shapes)))
    require(largest > 400_000, f"{op.name}: {largest} bytes show nothing; take larger arrays")
    require(
        peak < BUFFERS,
        f"{op.name} allocates {peak} bytes beside arrays of {largest}; compute into `out`, and ask"
        " for scratch by `workspace`",
    )


def stretch(arrays: Sequence[Array], rows: int = 60_000) -> list[Array]:
    """The arrays with about so many rows; none where they do not have rows of one number."""
    counts = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(counts) != 1 or max(counts) < 2:
        return []
    count = max(counts)
    again = np.arange(-(-rows // count) * count) % count
    return [array[again] for array in arrays]


def _fits(op: Op, arrays: Sequence[Array]) -> bool:
    try:
        op.infer(shapes_of(arrays))
    except GraphError:
        return False
    return True
