"""One test for every registered op: its example inputs are all that an op adds."""

import tracemalloc
from functools import partial

import conv_examples
import numpy as np
import optimizer_examples
import pytest
import transformer_examples
from op_examples import EXAMPLES, NO_GRADIENT

import mpiflow.ops  # noqa: F401  (registers the ops)
from mpiflow import testing
from mpiflow.compiler.cost import compute_bytes
from mpiflow.errors import GraphError
from mpiflow.exec.bind import Shard
from mpiflow.graph.op import OUT, REGISTRY, build_op
from mpiflow.graph.tensor import is_float
from mpiflow.testing.kernels import dtypes_of, shapes_of

OWN = sorted(name for name, cls in REGISTRY.items() if cls.source is None)
every_op = pytest.mark.parametrize("name", sorted(EXAMPLES))


@pytest.mark.parametrize("name", OWN)
def test_every_registered_op_has_example_inputs(name):
    assert EXAMPLES.get(name), f"add a line for {name} to op_examples.py"


@every_op
def test_inferred_shapes_and_dtypes_are_those_that_the_kernel_fills(name):
    for op, arrays in EXAMPLES[name]:
        testing.check_writes(op, arrays)


@every_op
def test_an_op_survives_the_way_into_a_plan_and_back(name):
    for op, _ in EXAMPLES[name]:
        testing.check_registered(op)


@every_op
def test_costs_are_positive(name):
    for op, arrays in EXAMPLES[name]:
        testing.check_costs(op, arrays)
        ins, outs = shapes_of(arrays), op.infer(shapes_of(arrays))
        assert compute_bytes(op, ins, outs, dtypes_of(arrays) + op.dtypes(dtypes_of(arrays))) > 0


@every_op
def test_every_signature_joins_to_the_whole(name):
    for op, arrays in EXAMPLES[name]:
        for parts in (1, 2, 3):  # dims of 1 to 7: even, uneven and empty spans
            testing.check_signatures(op, arrays, (parts,))


@every_op
def test_no_shard_costs_more_than_the_whole(name):
    for op, arrays in EXAMPLES[name]:
        testing.check_shard_costs(op, arrays)


OTHERS = NO_GRADIENT | conv_examples.JOINT_GRADIENT | {"Cast"}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - OTHERS))
def test_gradients_agree_with_central_differences(name):
    for op, arrays in EXAMPLES[name]:
        if is_float(dtypes_of(arrays)[0]):
            testing.check_gradients(op, arrays)


@pytest.mark.parametrize("name", sorted(NO_GRADIENT))
def test_ops_without_a_gradient_say_so(name):
    op, arrays = EXAMPLES[name][0]
    with pytest.raises(GraphError, match=f"{name} has no gradient"):
        op.grad(arrays, (), ())


@every_op
def test_outputs_may_lie_on_the_inputs_that_the_op_declares(name):
    for op, arrays in EXAMPLES[name]:
        testing.check_in_place(op, arrays)


def ones(shapes):
    return [np.ones(shape) for shape in shapes]


def large_cases():
    """(op, what makes arrays of about 60,000 rows), where rows can be added to an example."""
    for name, examples in EXAMPLES.items():
        for i, (op, arrays) in enumerate(examples):
            if name not in SPECIAL and testing.stretch(arrays, rows=1):
                yield pytest.param(op, partial(testing.stretch, arrays), id=f"{name}-{i}")
    for name, examples in SPECIAL.items():
        for i, (attributes, shapes) in enumerate(examples):
            op = build_op(name, attributes)
            yield pytest.param(op, partial(ones, shapes), id=f"{name}-{i}")


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


@pytest.mark.parametrize(("op", "make"), list(large_cases()))
def test_kernels_allocate_next_to_nothing(op, make):
    testing.check_memory(op, *make())


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
