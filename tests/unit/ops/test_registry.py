"""One test for every registered op: its example inputs are all that an op adds."""

import tracemalloc
from itertools import product
from math import prod

import conv_examples
import numpy as np
import optimizer_examples
import pytest
import transformer_examples
from op_examples import EXAMPLES, NO_GRADIENT
from op_harness import call, evaluate, poisoned, sharded, whole, workspace

import mpiflow.ops  # noqa: F401  (registers the ops)
from mpiflow.compiler.boxing import is_legal
from mpiflow.compiler.cost import compute_bytes
from mpiflow.errors import GraphError
from mpiflow.exec.bind import Shard
from mpiflow.graph import sbp
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import OUT, REGISTRY, build_op
from mpiflow.graph.tensor import is_float
from mpiflow.ops import multiply, reduce_sum

every_op = pytest.mark.parametrize("name", sorted(EXAMPLES))


def shapes_of(arrays):
    return tuple(a.shape for a in arrays)


def dtypes_of(arrays):
    return tuple(a.dtype.name for a in arrays)


def close(actual, expected, arrays, what):
    """Equal, up to the rounding of the narrowest floating-point array."""
    if expected.dtype.kind == "f":
        narrow = any(a.dtype == np.float32 for a in (*arrays, expected))
        rtol = 1e-5 if narrow else 1e-9
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol, err_msg=what)
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=what)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_registered_op_has_example_inputs(name):
    assert EXAMPLES.get(name), f"add a line for {name} to op_examples.py"


@every_op
def test_inferred_shapes_and_dtypes_are_those_that_the_kernel_fills(name):
    for op, arrays in EXAMPLES[name]:
        # The outputs come as NaN or a byte pattern, then as ones; they agree if all is written.
        first = whole(op, arrays)
        shapes, dtypes = op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays))
        again = [np.full(s, 1, d) for s, d in zip(shapes, dtypes, strict=True)]
        call(op, [a.copy() for a in arrays], shapes, dtypes, outs=again)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype.kind != "f" or not np.isnan(a).any()


@every_op
def test_an_op_survives_the_way_into_a_plan_and_back(name):
    for op, _ in EXAMPLES[name]:
        assert build_op(op.name, op.attributes()) == op


@every_op
def test_costs_are_positive(name):
    for op, arrays in EXAMPLES[name]:
        ins, outs = shapes_of(arrays), op.infer(shapes_of(arrays))
        assert op.flops(ins, outs) > 0
        assert compute_bytes(op, ins, outs, dtypes_of(arrays) + op.dtypes(dtypes_of(arrays))) > 0


def layouts(op, arrays, signatures):
    """Layouts of inputs and outputs for one signature per mesh axis."""
    inputs = [tuple(s.inputs[i] for s in signatures) for i in range(len(arrays))]
    outputs = range(len(signatures[0].outputs))
    return inputs, [tuple(s.outputs[i] for s in signatures) for i in outputs]


def check_signatures(op, arrays, sizes):
    expected = whole(op, arrays)
    signatures = op.signatures(shapes_of(arrays), dtypes_of(arrays))
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
    shapes = (*shapes_of(arrays), *(e.shape for e in expected))
    for chosen in product(signatures, repeat=len(sizes)):
        inputs, outputs = layouts(op, arrays, chosen)
        pairs = zip((*inputs, *outputs), shapes, strict=True)
        if all(is_legal(layout, shape, mesh) for layout, shape in pairs):
            joined = sharded(op, arrays, inputs, outputs, sizes)
            for a, b in zip(joined, expected, strict=True):
                close(a, b, arrays, " | ".join(map(str, chosen)))


@every_op
def test_every_signature_joins_to_the_whole(name):
    for op, arrays in EXAMPLES[name]:
        for parts in (1, 2, 3, 6):  # dims of 1 to 7: even, uneven and empty spans
            check_signatures(op, arrays, (parts,))


@every_op
def test_every_pair_of_signatures_nested_on_two_axes_joins_to_the_whole(name):
    check_signatures(*EXAMPLES[name][0], (2, 2))
    for op, arrays in EXAMPLES[name]:
        check_signatures(op, arrays, (2, 3))


@every_op
def test_no_shard_costs_more_than_the_whole(name):
    for op, arrays in EXAMPLES[name]:
        ins, outs = shapes_of(arrays), op.infer(shapes_of(arrays))
        for signature in op.signatures(ins, dtypes_of(arrays)):
            for place in ((0,), (5,)):  # the largest shard of six, and the smallest
                sbps = signature.inputs + signature.outputs
                local = tuple(
                    sbp.box_shape(sbp.shard_box(shape, (s,), (6,), place))
                    for shape, s in zip(ins + outs, sbps, strict=True)
                )
                local_ins, local_outs = local[: len(ins)], local[len(ins) :]
                assert 0 <= op.flops(local_ins, local_outs) <= op.flops(ins, outs)
                needed = op.workspace(local_ins, local_outs, "float64")
                assert 0 <= needed <= op.workspace(ins, outs, "float64")


OTHERS = NO_GRADIENT | conv_examples.JOINT_GRADIENT | {"Cast"}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - OTHERS))
def test_gradients_agree_with_central_differences(name):
    for op, arrays in EXAMPLES[name]:
        if is_float(dtypes_of(arrays)[0]):
            check_gradients(op, arrays)


def check_gradients(op, arrays):
    graph = Graph("test")
    with building(graph):
        tensors = [graph.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
        outputs = graph.add(op, *tensors)
        weights = [graph.input(f"weight{i}", y.shape, y.dtype) for i, y in enumerate(outputs)]
        terms = [reduce_sum(multiply(*pair)) for pair in zip(outputs, weights, strict=True)]
        loss = sum(terms[1:], terms[0])
        found = gradients(graph, loss, tensors)
    feeds = dict(zip(tensors, arrays, strict=True))
    draw = np.random.default_rng(3)
    feeds |= {weight: np.asarray(draw.standard_normal(weight.shape)) for weight in weights}
    for tensor, gradient in zip(tensors, found, strict=True):
        if gradient is None:
            assert not is_float(tensor.dtype) or op.name == "StopGradient"
            continue
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        (actual,) = evaluate(graph, [gradient], feeds)
        expected = central_differences(graph, loss, feeds, tensor)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def central_differences(graph, loss, feeds, tensor, step=1e-5):
    base = feeds[tensor]
    result = np.zeros(base.shape)
    for index in np.ndindex(base.shape):
        values = []
        for sign in (1, -1):
            moved = base.copy()
            moved[index] += sign * step
            values.append(evaluate(graph, [loss], {**feeds, tensor: moved})[0])
        result[index] = (values[0] - values[1]) / (2 * step)
    return result


@pytest.mark.parametrize("name", sorted(NO_GRADIENT))
def test_ops_without_a_gradient_say_so(name):
    op, arrays = EXAMPLES[name][0]
    with pytest.raises(GraphError, match=f"{name} has no gradient"):
        op.grad(arrays, (), ())


@every_op
def test_outputs_may_lie_on_the_inputs_that_the_op_declares(name):
    for op, arrays in EXAMPLES[name]:
        check_in_place(op, arrays)


def check_in_place(op, arrays):
    expected = whole(op, arrays)
    shapes, dtypes = op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays))
    for i, j in op.inplace:
        if arrays[i].shape != shapes[j] or arrays[i].dtype.name != dtypes[j]:
            continue  # the compiler lets only equal shapes and dtypes share memory
        inputs = [a.copy() for a in arrays]
        outs = [poisoned(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        outs[j] = inputs[i]
        call(op, inputs, shapes, dtypes, outs=outs)
        for a, b in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    if len(op.inplace) > 1 and len(shapes) > 1:  # all pairs at once, as an update has them
        inputs = [a.copy() for a in arrays]
        outs = [inputs[dict((j, i) for i, j in op.inplace)[j]] for j in range(len(shapes))]
        call(op, inputs, shapes, dtypes, outs=outs)
        for a, b in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def stretched(array, rows):
    factor = -(-rows // max(array.shape[0], 1)) if array.shape[0] > 1 else 1
    return np.concatenate([array] * factor)


def large_cases():
    """(op, arrays of about 60,000 rows), where rows can be added to an example."""
    for name, examples in EXAMPLES.items():
        for i, (op, arrays) in enumerate(examples):
            rows = {a.shape[0] if a.ndim else 0 for a in arrays}
            if len(rows) == 1 and max(rows) > 1 and name not in SPECIAL:
                larger = [stretched(a, 60_000) for a in arrays]
                yield pytest.param(op, larger, id=f"{name}-{i}")
    for name, examples in SPECIAL.items():
        for i, (attributes, shapes) in enumerate(examples):
            op = build_op(name, attributes)
            yield pytest.param(op, [np.ones(s) for s in shapes], id=f"{name}-{i}")


SPECIAL = {
    "MatMul": [
        ({}, [(300, 400), (400, 300)]),
        ({"transpose_a": True, "transpose_b": True}, [(400, 300), (300, 400)]),
        ({"transpose_a": True}, [(8, 64, 128), (8, 64, 128)]),
    ],
    "Linear": [({}, [(4, 100, 400), (400, 300)]), ({"transpose": True}, [(400, 300), (400, 300)])],
    "RowProduct": [({}, [(10, 40, 300), (10, 40, 400)])],
    "Reshape": [({"shape": (60_000, 2, 2)}, [(60_000, 4)])],
    "Expand": [({"dims": (0,), "lengths": (500,)}, [(300,)])],
    "Permute": [({"order": (1, 0)}, [(300, 500)])],
    "Fill": [({"shape": (60_000, 4)}, [])],
    "Add": [({}, [(60_000, 4), (4,)])],
    "Multiply": [({}, [(60_000, 4), (60_000, 1)])],
    **optimizer_examples.LARGE_EXAMPLES,
    **conv_examples.LARGE_EXAMPLES,
    **transformer_examples.LARGE_EXAMPLES,
}


@pytest.mark.parametrize(("op", "arrays"), list(large_cases()))
def test_kernels_allocate_next_to_nothing(op, arrays):
    shapes, dtypes = op.infer(shapes_of(arrays)), op.dtypes(dtypes_of(arrays))
    outs = [poisoned(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    work, _ = workspace(op, shapes_of(arrays), shapes, dtypes[0])
    starts = {i: (0,) * a.ndim for i, a in enumerate(arrays)} | {OUT: (0,) * len(shapes[0])}
    shard = Shard(np, work, starts, True)
    out = outs[0] if len(outs) == 1 else tuple(outs)
    op.kernel(shard, out, *arrays)
    tracemalloc.start()
    try:
        op.kernel(shard, out, *arrays)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest = 8 * max(map(prod, [*shapes_of(arrays), *shapes]))
    assert largest > 400_000
    # NumPy casts and broadcasts through a buffer of 8192 elements at most.
    assert peak < 270_000, f"{op.name} allocates {peak} bytes beside arrays of {largest}"


@pytest.mark.parametrize("name", ["Uniform", "Normal"])
def test_initialisers_work_in_blocks(name):
    op = build_op(name, {"shape": (1_000_000,), "key": (1, 2)})
    out = np.empty(1_000_000, np.float32)
    shard = Shard(np, None, {OUT: (0,)}, True)
    tracemalloc.start()
    op.kernel(shard, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000
