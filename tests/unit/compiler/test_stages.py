"""Which stage does what: balanced cuts, pins, tied weights, skips; and messages between stages."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from jobs import classifier, compile_for

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.compiler.stages import assign_stages
from mpiflow.errors import CompileError, GraphError
from mpiflow.graph.graph import Graph, building
from mpiflow.plan.records import RECEIVE, SEND


def job(model, **more):
    """A job of a model(x) on the features of the classifier."""

    def build(batch):
        return model(mf.cast(batch["image"], "float32") / 16)

    train = mf.Dataset("train-*.h5", batch=24)
    return mf.Job("staged", build, train=train, optimizer=mf.SGD(lr=0.1), **more)


def found(model, mesh="stage=2", pipeline=None, **more):
    """(stages, plan) of a model."""
    seen = {}
    plan = compile_for(
        mesh, job(model, **more), pipeline=pipeline or Pipeline(),
        observe=lambda step, program, result: seen.setdefault(step, result),
    )  # fmt: skip
    return seen["stages"], plan


def loss(y):
    return {"loss": mf.mean(mf.square(y))}


def layers(count, width=7):
    def model(x):
        for i in range(count):
            x = mf.tanh(nn.Dense(width, bias=False, name=f"layer{i}")(x))
        return loss(x)

    return model


def kept(stages):
    return {tensor.name: where for tensor, where in stages.variables.items()}


def messages(plan, kind=SEND, program="train"):
    """(from or to which stage, tensor) of each message, by stage."""
    return {
        p.stage: [(t.attributes["stage"], t.name.partition(">")[0].partition("<")[0])
                  for t in p.tasks if t.kind == kind]
        for p in plan.programs if p.name == program
    }  # fmt: skip


def chain(count, widths=None):
    """A graph of products with matrices."""
    widths, graph = widths or [3] * (count + 1), Graph("train")
    with building(graph):
        x = graph.input("x", (4, widths[0]), "float32")
        for i in range(count):
            x = x @ graph.variable(f"w{i}", (widths[i], widths[i + 1]), init=nn.constant(1.0))
        graph.outputs["y"] = x
    return graph


def cut(graph, seconds, stages, virtual=1):
    return cut_unequal(graph, [seconds] * stages, virtual)


def cut_unequal(graph, seconds, virtual=1):
    each = [dict(zip(graph.nodes, stage, strict=True)) for stage in seconds]
    return assign_stages(graph, each, virtual)


def test_a_stage_whose_ranks_are_faster_has_more_layers():
    stages = cut_unequal(chain(8), [[1.0] * 8, [1 / 3] * 8])
    assert [kept(stages)[f"w{i}"] for i in range(8)] == [(0,)] * 2 + [(1,)] * 6
    assert stages.seconds == (2.0, pytest.approx(2.0))


def test_equal_layers_are_shared_out_equally():
    stages = cut(chain(8), [1.0] * 8, 4)
    assert [kept(stages)[f"w{i}"] for i in range(8)] == [(i // 2,) for i in range(8)]
    assert stages.seconds == (2.0,) * 4


def test_virtual_pieces_go_round_the_stages():
    graph = chain(8)
    stages = cut(graph, [1.0] * 8, 2, 2)
    assert stages.count == 4
    held = [[i for i, node in enumerate(graph.nodes) if stages.on(node, s)] for s in (0, 1)]
    assert held == [[0, 1, 4, 5], [2, 3, 6, 7]]


def longest(seconds, cuts):
    return max(sum(seconds[a:b]) for a, b in zip((0, *cuts), (*cuts, len(seconds)), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_piece_is_as_short_as_trying_every_cut_makes_it(seed):
    draw = random.Random(seed)
    graph, count = chain(draw.randint(4, 9)), draw.randint(2, 4)
    seconds = [draw.choice([0.0, 1.0, draw.random() * 5]) for _ in graph.nodes]
    stages = cut(graph, seconds, count)
    best = min(longest(seconds, cuts) for cuts in combinations(range(1, len(seconds)), count - 1))
    assert max(stages.seconds) <= 1.05 * best
    assert sorted(stages.nodes.values()) == list(stages.nodes.values())


def test_of_cuts_about_as_good_the_one_that_sends_least_is_taken():
    graph = chain(3, [3, 40, 2, 40])
    assert kept(cut(graph, [1.0, 0.02, 1.0], 2))["w1"] == (0,)
    assert kept(cut(graph, [1.0, 0.2, 0.9], 2))["w1"] == (1,)


def test_what_is_pinned_stays_where_it_is_pinned():
    def model(x):
        with mf.stage(0):
            x = mf.tanh(nn.Dense(7, name="first")(x))
        for i in range(4):
            x = mf.tanh(nn.Dense(7, name=f"free{i}")(x))
        with mf.stage(1):
            return loss(nn.Dense(7, name="last")(x))

    def uneven(x):
        with mf.stage(0):
            for i in range(5):
                x = mf.tanh(nn.Dense(7, name=f"layer{i}")(x))
        with mf.stage(1):
            return loss(nn.Dense(7, name="last")(x))

    where = kept(found(model)[0])
    assert (where["first.weight"], where["last.weight"]) == ((0,), (1,))
    where = kept(found(uneven)[0])
    assert [where[f"layer{i}.weight"] for i in range(5)] == [(0,)] * 5


def pinned(order):
    def model(x):
        for i, stage in enumerate(order):
            with mf.stage(stage):
                x = mf.tanh(nn.Dense(7, name=f"layer{i}")(x))
        return loss(x)

    return model


def test_neighbours_share_a_stage_where_a_mesh_has_fewer_than_are_named():
    where = kept(found(pinned([0, 1, 2, 3]))[0])
    assert [where[f"layer{i}.weight"] for i in range(4)] == [(0,), (0,), (1,), (1,)]


def test_pins_have_no_effect_without_stages():
    plan = compile_for("data=2", job(pinned([0, 1, 2])))
    free = compile_for("data=2", job(layers(3)))
    assert plan.mesh.stages == 1
    assert len(plan.program("train").tasks) > len(free.program("train").tasks)  # biases


def test_an_inner_pin_is_the_one_that_counts_and_ends_with_its_block():
    def model(x):
        with mf.stage(0):
            x = mf.tanh(nn.Dense(7, name="a")(x))
            with mf.stage(1):
                y = mf.tanh(nn.Dense(7, name="b")(x))
        return loss(nn.Dense(7, name="c")(y))

    where = kept(found(model)[0])
    assert [where[f"{name}.weight"] for name in "abc"] == [(0,), (1,), (1,)]


@pytest.mark.parametrize("index", [-1, True, 1.0, "one", None])
def test_a_stage_has_a_number(index):
    with pytest.raises(GraphError, match=r"mf.stage\(.*counted from 0.*\n  .*test_stages.py:\d+"):
        found(pinned([0, index]))


def test_stages_are_named_in_the_order_of_the_model():
    with pytest.raises(CompileError, match=r"layer1/linear is pinned to stage 0.*later stage") as e:
        found(pinned([1, 0]))
    assert "test_stages.py:" in str(e.value)


def test_pins_that_name_fewer_stages_than_there_are_pieces_are_refused():
    with pytest.raises(CompileError, match=r"names 2 stages with mf.stage.* 3 pieces"):
        found(pinned([0, 1]), "stage=3")


def test_a_stage_that_nothing_is_left_for_is_refused():
    with pytest.raises(CompileError, match="no way to cut the model into 3 pieces"):
        found(pinned([0, 2]), "stage=3")


def test_a_model_of_fewer_nodes_than_pieces_is_refused():
    def model(x):
        return {"loss": mf.mean(nn.Dense(1, bias=False, name="only")(x))}

    with pytest.raises(CompileError, match=r"cannot be cut into 6 pieces, use fewer stages"):
        found(model, "stage=6")


def tied(x):
    table = nn.variable("table", (6, 6), nn.uniform(1.0))
    x = mf.tanh(x @ table)
    for i in range(3):
        x = mf.tanh(nn.Dense(6, bias=False, name=f"middle{i}")(x))
    return loss(x @ mf.permute(table, (1, 0)))


@pytest.mark.parametrize("optimizer", [mf.SGD(lr=0.1, clip=1.0), mf.LAMB(0.1), mf.Adam(0.1)])
def test_a_tied_weight_is_kept_and_updated_on_both_stages(optimizer):
    """Gradients of both uses are added up once, sent to where the weight is, and applied there."""
    made = replace(job(tied), optimizer=optimizer)
    plan = compile_for("stage=2", made)
    for stage in plan.stages():
        assert "table" in {v.name for v in stage.variables}
        tasks = stage.program("train").tasks
        assert sum("table" in t.outputs for t in tasks) == 1
    saved = [t.attributes["variable"] for p in plan.programs if p.name == "save"
             for t in p.tasks if t.kind == "write"]  # fmt: skip
    assert sorted(saved) == sorted({v.name for v in plan.variables})


def test_a_skip_is_sent_once_to_each_stage_that_reads_it():
    def model(x):
        skip = mf.tanh(nn.Dense(7, name="a")(x))
        y = skip
        for i in range(3):
            y = mf.tanh(nn.Dense(7, name=f"b{i}")(y))
            y = y + skip
        return loss(y)

    _, plan = found(model, "stage=3")
    sent = messages(plan)
    for stage in range(3):
        assert len(set(sent[stage])) == len(sent[stage])
    forward = [name for target, name in sent[0] if target == 2]
    assert forward.count("tanh") <= 1


def test_masks_are_made_where_they_are_used_and_not_sent():
    def model(x):
        mask = mf.cast(mf.greater(x, 0.5), "float32")
        for i in range(4):
            x = mf.tanh(nn.Dense(6, bias=False, name=f"layer{i}")(x)) * mask
        return loss(x)

    stages, plan = found(model)
    (mask,) = (node for node in stages.nodes if node.outputs[0].dtype == "bool")
    assert stages.nodes[mask] == (0, 1)
    sent = {name for each in messages(plan).values() for _, name in each}
    assert not sent & {mask.name, *(n.name for n in stages.nodes if mask.outputs[0] in n.inputs)}


def test_several_losses_are_given_by_every_stage():
    def model(x):
        a = mf.tanh(nn.Dense(7, name="a")(x))
        early = mf.mean(mf.square(a))
        b = mf.tanh(nn.Dense(7, name="c")(mf.tanh(nn.Dense(7, name="b")(a))))
        return {"loss": mf.mean(b) + early, "early": early, "total": mf.total(mf.square(b))}

    _, plan = found(model)
    for stage in plan.stages():
        outputs = stage.program("train").outputs
        assert [o.name for o in outputs] == ["loss", "early", "total"]


def test_a_scaled_loss_of_which_the_value_is_unused_is_differentiated():
    _, plan = found(layers(3), precision="float16", micro_batches=2)
    for stage in plan.stages():
        assert {"loss_scale", "skipped"} <= {o.name for o in stage.program("train").outputs}


def test_messages_are_received_as_they_are_sent():
    _, plan = found(tied, "stage=3,data=2", micro_batches=4)
    sent = {(a, b, name) for a, each in messages(plan, SEND).items() for b, name in each}
    received = {(b, a, name) for a, each in messages(plan, RECEIVE).items() for b, name in each}
    assert sent == received
    assert sent


def test_an_evaluation_is_cut_where_training_is():
    plan = compile_for("stage=2", classifier(64, hidden="B"))
    for stage in plan.stages():
        trained = {v.name for v in stage.variables}
        for name in ("evaluate", "evaluate_tail"):
            program = stage.program(name)
            read = {n for t in program.tasks for n in t.inputs if n.endswith((".weight", ".bias"))}
            assert read <= trained


def test_evaluations_stream_through_the_stages_in_as_many_micro_batches_as_rows_allow():
    def counts(mesh, micro_batches, test_rows):
        made = replace(classifier(64, hidden="B"), micro_batches=micro_batches)
        plan = compile_for(mesh, made, test_rows=test_rows)
        return [
            {p.micro_batches for p in plan.programs if p.name == name}
            for name in ("evaluate", "evaluate_tail")
        ]

    assert counts("stage=2", 8, 64 + 12) == [{8}, {6}]
    assert counts("stage=2", 4, 64 + 13) == [{4}, {1}]
    assert counts("stage=2,data=4", 8, 64 + 12) == [{8}, {3}]  # a row for each rank
    assert counts("stage=2", 1, 64 + 12) == [{1}, {1}]
    assert counts("data=2", 8, 64 + 12) == [{1}, {1}]  # which would only take longer


def test_an_evaluation_that_needs_the_whole_batch_is_not_cut_and_says_so():
    def model(batch):
        x = mf.tanh(nn.Dense(7, name="first")(mf.cast(batch["image"], "float32")))
        x = nn.Dense(7, name="second")(x)
        found = {"loss": mf.mean(mf.square(x))}
        if not mf.is_training():
            found["spread"] = mf.mean(mf.square(x - mf.mean(x)))
        return found

    data = mf.Dataset("train-*.h5", batch=24)
    made = mf.Job("spread", model, train=data, evaluate=data, optimizer=mf.SGD(lr=0.1),
                  micro_batches=4)  # fmt: skip
    plan = compile_for("stage=2", made, test_rows=24)
    assert {p.micro_batches for p in plan.programs if p.name == "evaluate"} == {1}
    assert sum("evaluate is not cut into micro-batches" in note for note in plan.notes) == 1


def test_a_stage_goes_through_no_loop_that_only_others_need():
    """Weights are read on both stages; their sum, in a loop of its own, on the second alone."""

    def model(batch):
        weight = mf.cast(batch["label"], "float32") + 1.0
        with mf.stage(0):
            x = mf.cast(batch["image"], "float32") * mf.reshape(weight, (-1, 1))
            x = mf.tanh(nn.Dense(6, name="first")(x))
        with mf.stage(1):
            rows = mf.reshape(nn.Dense(1, name="last")(x), (-1,))
            return {"loss": mf.reduce_sum(mf.square(rows) * weight) / mf.reduce_sum(weight)}

    plan = compile_for("stage=2", replace(job(loss), model=model, micro_batches=4))
    first, second = (
        {t.phase for t in stage.program("train").tasks if t.kind == "compute"}
        for stage in plan.stages()
    )
    assert {1, 3} <= second
    assert 1 not in first


def forked(x):
    """What is made on the first of six pieces is used on the second, or only on the last."""
    with mf.stage(0):
        skip = mf.tanh(nn.Dense(6, bias=False, name="layer0")(x))
        x = mf.tanh(nn.Dense(6, bias=False, name="more")(skip))
    for i in range(1, 5):
        with mf.stage(i):
            x = mf.tanh(nn.Dense(6, bias=False, name=f"layer{i}")(x))
    with mf.stage(5):
        return loss(nn.Dense(6, bias=False, name="last")(x * skip))


def test_messages_that_are_used_in_different_segments_have_lanes_of_their_own():
    """Else they would be sent in one order, and received in another."""
    pipeline = Pipeline("interleaved", 3)
    _, plan = found(forked, "stage=2", pipeline, micro_batches=4)
    first, second = (stage.program("train") for stage in plan.stages())
    received = {}
    for task in second.tasks:
        if task.kind == RECEIVE and task.phase % 2:
            received.setdefault(task.stream, set()).add(task.segment)
    assert all(len(segments) == 1 for segments in received.values())
    assert {t.stream.partition(".0.")[2] for t in second.tasks if t.kind == RECEIVE} == {
        t.stream.partition(".1.")[2] for t in first.tasks if t.kind == SEND
    }


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_of_what_makes_up_a_sum_of_all_stages_each_sends_one_scalar(precision):
    """The norm of all gradients and the count of what is not finite in them.

    The first stage, to which the backward pass comes last, adds them up. The last one has a single
    layer, whose scalar is sent as it is.
    """
    made = replace(job(layers(8), precision=precision), optimizer=mf.SGD(lr=0.1, clip=1.0))
    plan = compile_for("stage=4,data=2", made)
    sent = messages(plan)
    for scope in ("update", "loss_scale")[: 1 + (precision == "float16")]:
        mine = [[to for to, what in sent[stage] if f"{scope}/" in what and "where" not in what]
                for stage in range(4)]  # fmt: skip
        assert mine == [[1, 2, 3], [0], [0], [0]]
        sums = [t for p in plan.programs for t in p.tasks
                if t.op == "SumScalars" and t.name.startswith(scope)]  # fmt: skip
        total = next(t for t in sums if t.name == f"{scope}/sum_scalars")
        assert sum(len(t.inputs) for t in sums) == 8 + len(sums) - 1
        assert sum("<stage" in name for name in total.inputs) == 3
