import re

import pytest

from mpiflow import ops
from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.rule import parse_rule


def signatures(pattern, *shapes, whole="", linear=(), reduce="sum"):
    rule = parse_rule(pattern, tuple(map(len, shapes)))
    sizes = rule.sizes("Op", shapes, {})
    return [str(s) for s in rule.signatures(sizes, frozenset(whole.split()), linear, reduce)]


def test_the_rule_of_a_matrix_product_gives_its_table():
    assert signatures("m k, k n -> m n", (5, 4), (4, 3), linear=((0,), (1,))) == [
        "B, B -> B", "S(0), B -> S(0)", "S(1), S(0) -> P", "B, S(1) -> S(1)", "P, B -> P",
        "B, P -> P",
    ]  # fmt: skip


def test_a_whole_letter_is_not_split():
    assert signatures("... c -> ... c", (5, 4), whole="c") == ["B -> B", "S(0) -> S(0)"]


def test_a_letter_lost_to_a_maximum_gives_a_partial_maximum():
    assert signatures("n c -> n", (5, 4), reduce="max") == [
        "B -> B", "S(0) -> S(0)", "S(1) -> P(max)"
    ]  # fmt: skip


def test_a_compound_dim_is_split_along_its_first_letter_in_units_of_the_others():
    rule = parse_rule("n (h d) -> n h d")
    sizes = rule.sizes("Split", ((5, 12),), {"h": 3})
    assert rule.output_shapes(sizes) == ((5, 3, 4),)
    found = [str(s) for s in rule.signatures(sizes, frozenset(), ((0,),), "sum")]
    assert found == ["B -> B", "S(0) -> S(0)", "S(1,unit=4) -> S(1)", "P -> P"]


def test_dots_stand_for_the_leading_dims_that_there_are():
    rule = parse_rule("... m k, ... k n -> ... m n", (4, 4))
    sizes = rule.sizes("MatMul", ((2, 3, 5, 4), (2, 3, 4, 6)), {})
    assert rule.output_shapes(sizes) == ((2, 3, 5, 6),)


def test_flops_count_two_for_a_contraction():
    for pattern, shapes, flops in [
        ("m k, k n -> m n", ((5, 4), (4, 3)), 120),
        ("n c -> n", ((5, 4),), 20),
        ("n m, m -> n m", ((5, 4), (4,)), 20),
    ]:
        rule = parse_rule(pattern)
        assert rule.flops(rule.sizes("Op", shapes, {})) == flops


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x, y, i: x @ y, "MatMul: shapes (5, 4) and (3, 4) do not fit, a dim is 3 and"
                                " should be 4"),
        (lambda x, y, i: x + y, "Add: shapes (5, 4) and (3, 4) do not fit"),
        (lambda x, y, i: x + ops.reduce_sum(x, 1), "Add: shapes (5, 4) and (5,) do not fit"),
        (lambda x, y, i: ops.reduce_sum(x, 1) + ops.reduce_sum(x, 1, keep=True),
         "Add: shapes (5,) and (5, 1) would both be stretched"),
        (lambda x, y, i: ops.reduce_sum(x, 1) + i,
         "Add takes inputs of one dtype, not float32 and int64; cast one"),
        (lambda x, y, i: ops.linear(i, i), "Linear: input 1 has 1 dims (5,), it takes 2"),
        (lambda x, y, i: ops.matmul(ops.cast(x, "int64"), ops.cast(x, "int64")), "do not fit"),
        (lambda x, y, i: ops.matmul(x, ops.reduce_sum(x)), "MatMul: input 1 has 0 dims (), it"),
        (lambda x, y, i: ops.exp(i), "Exp takes floating-point inputs, not int64; cast it"),
        (lambda x, y, i: ops.pick(x, ops.reduce_sum(x, 1)), "takes integers as indices"),
        (lambda x, y, i: ops.reshape(x, (3, 7)), "reshape: (5, 4) has 20 elements, (3, 7) has 21"),
        (lambda x, y, i: ops.permute(x, (0, 0)), "(0, 0) does not order the dims of (5, 4)"),
        (lambda x, y, i: ops.reduce_sum(x, 2), "reduce_sum: there is no dim 2 in a tensor of 2"),
        (lambda x, y, i: ops.mean(i), "mean: batch/i is int64; cast it to float32"),
        (lambda x, y, i: ops.cast(x, "float31"), "dtype 'float31' is none of"),
        (lambda x, y, i: ops.equal(ops.reduce_sum(x, 1), i),
         "Equal compares float32 with int64; cast one"),
        (lambda x, y, i: i * 0.5, "is int64; cast it before arithmetic with 0.5"),
        (lambda x, y, i: x * "2", "'2' (str) is neither a tensor nor a number"),
        (lambda x, y, i: x - None, "None (NoneType) is neither a tensor nor a number"),
        (lambda x, y, i: x / 0, "division by zero"),
        (lambda x, y, i: ops.cast(i, "bool") - ops.cast(i, "bool"),
         "Subtract takes numbers, not bool; cast it"),
        (lambda x, y, i: 1 - ops.cast(i, "uint8"), "is uint8, which cannot hold -1; cast it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_shapes_and_the_users_line(build, message):
    with building(Graph("test")) as graph:
        x, y = graph.input("x", (5, 4), "float32"), graph.input("y", (3, 4), "float32")
        i = graph.input("i", (5,), "int64")
        with pytest.raises(GraphError, match=re.escape(message)) as caught:
            build(x, y, i)
    assert f"{__file__}:{build.__code__.co_firstlineno}" in str(caught.value)
