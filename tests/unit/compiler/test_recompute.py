"""Which activations stay, in which blocks the others are made again, and where that stands."""

from itertools import pairwise

import pytest

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.again import rewritten
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.attempts import cheapest
from mpiflow.compiler.blocks import activation_nodes, find_blocks, tensor_bytes
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.fit import Attempt
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.recompute import FULL, NONE, SELECTIVE, Recompute, all_kept, check_recompute
from mpiflow.errors import UsageError
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.mesh import parse_mesh

MACHINE = find_machine("cpu")
LAYERS, ROWS, WIDTH = 5, 32, 64


def layer(x, i):
    h = mf.gelu(nn.Dense(4 * WIDTH, name=f"layer{i}.up")(nn.LayerNorm(name=f"layer{i}.norm")(x)))
    return x + nn.Dense(WIDTH, name=f"layer{i}.down")(mf.dropout(h, 0.2))


def graph_of(marked=(), layers=LAYERS):
    graph = Graph("train")
    with building(graph):
        x = nn.Dense(WIDTH, name="first")(graph.input("x", (ROWS, WIDTH), "float32"))
        for i in range(layers):
            if i in marked:
                with mf.recompute():
                    x = layer(x, i)
            else:
                x = layer(x, i)
        graph.outputs["loss"] = mf.mean(mf.square(x))
    differentiate(graph, mf.SGD(lr=0.1))
    return graph


def recompute_of(pieces=None, **more):
    return Recompute(graph_of(**more), MACHINE, pieces or {})


def names(nodes):
    return [node.name for node in nodes]


def test_blocks_are_all_that_depends_on_batch_and_weights_and_cut_where_one_tensor_crosses():
    graph = graph_of()
    blocks = find_blocks(graph, {})
    assert [n for block in blocks for n in block.nodes] == activation_nodes(graph)
    assert len(blocks) > 2
    for before, block in pairwise(blocks):
        made = {t for node in before.nodes for t in node.outputs}
        crossing = {t for node in block.nodes for t in node.inputs if t in made}
        assert [t.shape for t in crossing] == [(ROWS, WIDTH)]


def test_no_block_is_on_two_pieces_of_a_pipeline():
    graph = graph_of()
    nodes = activation_nodes(graph)
    pieces = {node: int(i >= 11) for i, node in enumerate(nodes)}
    blocks = find_blocks(graph, pieces)
    assert all({pieces[node] for node in block.nodes} == {block.piece} for block in blocks)
    assert {block.piece for block in blocks} == {0, 1}


def test_what_is_marked_is_a_block_of_its_own():
    blocks = find_blocks(graph_of(marked=(1, 2)), {})
    marked = [block for block in blocks if block.marked]
    assert [block.nodes[0].name.partition("/")[0] for block in marked] == [
        "layer1.norm", "layer2.norm",
    ]  # fmt: skip


def test_each_level_keeps_less_and_full_keeps_what_blocks_are_given():
    recompute = recompute_of()
    kept = [recompute.kept(recompute.levels(level)) for level in (NONE, SELECTIVE, FULL)]
    assert kept[0].tensors == all_kept(recompute.graph).tensors
    assert kept[0].nbytes > kept[1].nbytes > kept[2].nbytes
    again = {t for nodes in kept[2].again for node in nodes for t in node.outputs}
    for tensor in kept[2].tensors:
        block = recompute.block_of.get(tensor.node, -1)
        inside = all(i == block for i in recompute.readers.get(tensor, {block}))
        assert tensor not in again
        assert block < 0 or block == recompute.last or not inside


def test_selective_does_no_product_again_and_keeps_nothing_that_did_not_stay_before():
    recompute = recompute_of()
    kept = recompute.kept(recompute.levels(SELECTIVE))
    ops = {node.op.name for nodes in kept.again for node in nodes}
    assert "Gelu" in ops
    assert "Linear" not in ops
    assert set(kept.tensors) <= set(all_kept(recompute.graph).tensors)


def test_the_last_block_is_never_done_again_unless_all_are_in_flight():
    graph = graph_of()
    assert not Recompute(graph, MACHINE, {}).kept(recompute_of().levels(FULL)).again[-1]
    every = Recompute(graph, MACHINE, {}, all_again=True)
    assert every.kept(every.levels(FULL)).again[-1]


def test_small_results_stay_and_are_not_made_again():
    graph = Graph("train")
    with building(graph):
        x = nn.Conv(4, 3, name="first")(graph.input("x", (ROWS, 3, 9, 9), "float32"))
        for i in range(4):
            x = mf.relu(nn.BatchNorm(name=f"norm{i}")(nn.Conv(4, 1, name=f"conv{i}")(x)))
        graph.outputs["loss"] = mf.mean(mf.square(x))
    differentiate(graph, mf.SGD(lr=0.1))
    recompute = Recompute(graph, MACHINE, {})
    ops = {n.op.name for nodes in recompute.kept(recompute.levels(FULL)).again for n in nodes}
    assert "BatchNorm" in ops
    assert "BatchNormSums" not in ops


def test_copies_stand_behind_the_gradient_they_wait_for_and_have_their_nodes_ops():
    recompute = recompute_of()
    graph = rewritten(recompute, recompute.kept(recompute.levels(FULL)))
    place = {node: i for i, node in enumerate(graph.nodes)}
    copies = [node for node in graph.nodes if node.name.startswith("again/")]
    assert any(node.op.name == "Dropout" for node in copies)
    for copy in copies:
        assert copy.op is graph.origins[copy].op
        assert place[graph.after[copy].node] < place[copy]
    for node in graph.nodes:  # in order, and each knows what it makes
        assert all(t.node is node for t in node.outputs)
        assert all(t.node is None or place[t.node] < place[node] for t in node.inputs)


def test_backward_nodes_read_copies_and_the_given_graph_is_as_it_was():
    recompute = recompute_of()
    before = str(recompute.graph)
    kept = recompute.kept(recompute.levels(FULL))
    graph = rewritten(recompute, kept)
    assert str(recompute.graph) == before
    assert set(all_kept(graph).tensors) == set(kept.tensors)
    assert names(n for n in graph.nodes if not n.name.startswith("again/")) == names(
        recompute.graph.live()
    )


def test_nothing_to_do_again_gives_the_graph_itself():
    recompute = recompute_of()
    assert rewritten(recompute, recompute.kept(recompute.levels(NONE))) is recompute.graph


def test_steps_keep_less_and_less_from_selective_to_full():
    recompute = recompute_of()
    steps = recompute.steps()
    held = [recompute.kept(levels).nbytes for levels in steps]
    assert steps[0] == recompute.levels(SELECTIVE)
    assert steps[-1] == recompute.levels(FULL)
    assert held == sorted(held, reverse=True)


def test_many_equal_layers_make_about_the_square_root_of_them():
    graph = Graph("train")
    with building(graph):
        x = nn.Dense(WIDTH, name="first")(graph.input("x", (ROWS, WIDTH), "float32"))
        for _ in range(64):
            x = mf.tanh(x)
        graph.outputs["loss"] = mf.mean(mf.square(x))
    differentiate(graph, mf.SGD(lr=0.1))
    blocks = find_blocks(graph, {})
    assert 6 <= len(blocks) <= 11
    recompute = Recompute(graph, MACHINE, {})
    kept = recompute.kept(recompute.levels(FULL))
    assert kept.nbytes <= 20 * tensor_bytes(x)


STEPS = ["selective", "one", "two", "full"]
BYTES = {"none": 100, "selective": 80, "one": 60, "two": 50, "full": 40}


def chosen(limit, recompute):
    """The level that is chosen under a limit, and those that were planned."""
    planned = []

    def planner(level):
        def plan(_):
            planned.append(level)
            return Attempt(level, BYTES[level], lambda: float(BYTES[level]))

        return plan

    target = Target(parse_mesh("data=1"), MACHINE, memory=limit, recompute=recompute)
    return cheapest(target, lambda: STEPS, [], planner, list(BYTES).index).made, planned


def test_nothing_is_computed_again_where_all_fits():
    assert chosen(100, "auto") == ("none", ["none"])
    assert chosen(0, "auto") == ("none", ["none"])


@pytest.mark.parametrize(("limit", "level"), [(99, "selective"), (79, "one"), (55, "two"),
                                              (41, "full")])  # fmt: skip
def test_under_a_limit_the_least_is_computed_again_that_fits(limit, level, monkeypatch):
    from mpiflow.compiler import attempts

    def refuse(*given):
        raise attempts.TooLarge.__new__(attempts.TooLarge)

    monkeypatch.setattr(attempts, "within", refuse)  # no layouts fit
    assert chosen(limit, "auto")[0] == level
    assert chosen(limit, None)[0] == level
    with pytest.raises(attempts.TooLarge):
        chosen(limit, "none")


def test_levels_are_checked():
    for level in (None, "none", "selective", "full", "auto"):
        check_recompute(level)
    with pytest.raises(UsageError, match="none, selective, full, auto, not half"):
        check_recompute("half")
