"""What fires once a step and what once a micro-batch, on small graphs and on whole jobs."""

from dataclasses import replace

import pytest
from jobs import classifier, compile_for, data_set

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.domains import hinted
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.microbatch import divide
from mpiflow.compiler.signature import choose
from mpiflow.compiler.trace import trace
from mpiflow.errors import CompileError, JobError, UsageError
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import B, P, Partial, S
from mpiflow.graph.tensor import is_narrow

ROWS = 12


def graph_of(model, parts=4):
    """The graph of a model on x (ROWS, 6) and label (ROWS,)."""
    graph = Graph("train", micro_batches=parts)
    with building(graph):
        x = graph.input("x", (ROWS, 6), "float32")
        graph.outputs.update(model(x, graph.input("label", (ROWS,), "int64")))
    return graph


def divided(model, parts=4):
    """(loops, signature) of each node by its name."""
    timing = divide(graph_of(model, parts), parts)
    return {n.name: (timing.loops[n], str(s)) for n, s in timing.signatures.items()}, timing


def squares(y):
    return {"loss": mf.mean(mf.square(y))}


def test_a_forward_pass_fires_in_the_loop_and_what_ends_its_sums_once():
    found, timing = divided(lambda x, label: squares(nn.Dense(3, name="d")(x)))
    assert timing.count == 1
    assert found["d/linear"] == ((1,), "S(0), B -> S(0)")
    assert found["reduce_sum"] == ((1,), "S(0) -> P")
    assert found["scale"] == ((), "B -> B")  # the mean's, of the sum of all


def test_what_reads_variables_alone_fires_once():
    def model(x, label):
        weight = mf.tanh(nn.variable("w", (6, 3), nn.uniform(1.0)))
        return squares(x @ weight)

    found, _ = divided(model)
    assert found["tanh"] == ((), "B -> B")
    assert found["mat_mul"] == ((1,), "S(0), B -> S(0)")


def test_a_count_of_labels_is_made_in_a_loop_that_comes_first():
    def model(x, label):
        known = mf.cast(mf.not_equal(label, -1), "float32")
        loss = mf.reduce_sum(mf.square(nn.Dense(3, name="d")(x)), 1)
        return {"loss": mf.reduce_sum(loss * known / mf.reduce_sum(known))}

    found, timing = divided(model)
    assert timing.count == 2
    assert found["compare"][0] == found["cast"][0] == (1, 2)  # the weights are used in both
    assert found["reduce_sum.1"] == ((1,), "S(0) -> P")
    assert found["d/linear"][0] == found["divide"][0] == (2,)


def standardised(x):
    centred = x - mf.reduce_sum(x, 0) * (1 / ROWS)
    return centred / mf.sqrt(mf.reduce_sum(mf.square(centred), 0) * (1 / ROWS))


def test_an_early_value_that_needs_an_early_value_takes_two_loops_before_the_main_one():
    found, timing = divided(lambda x, label: squares(nn.Dense(3, name="d")(standardised(x))))
    assert timing.count == 3
    assert str(timing).startswith("4 micro-batches, 3 loops\n")
    assert found["reduce_sum"][0] == (1,)
    assert found["subtract"][0] == (2, 3)
    assert found["reduce_sum.1"][0] == (2,)
    assert found["divide"][0] == found["d/linear"][0] == (3,)
    assert found["sqrt"] == ((), "B -> B")


def test_a_loop_cuts_what_was_made_of_the_whole_batch_of_inputs():
    def model(x, label):
        weight = mf.softmax(mf.reduce_sum(x, 1))  # over the rows, which nothing may split
        return {"loss": mf.reduce_sum(weight * mf.reduce_sum(nn.Dense(3, name="d")(x), 1))}

    found, timing = divided(model)
    assert timing.count == 2
    assert found["softmax"] == ((), "B -> B")
    assert found["reduce_sum"][0] == (1,)
    assert found["multiply"] == ((2,), "S(0), S(0) -> S(0)")


def test_a_value_of_the_whole_batch_that_nothing_in_the_loop_uses_comes_after_it():
    def model(x, label):
        y = nn.Dense(3, name="d")(x)
        return squares(y) | {"ratio": mf.reduce_sum(y) / mf.reduce_max(y)}

    found, timing = divided(model)
    assert timing.count == 1
    assert found["reduce_max"] == ((1,), "S(0) -> P(max)")
    assert found["divide"] == ((), "B, B -> B")


def scaled_rows(x, label):
    return squares(mf.reduce_sum(x, 1) * nn.variable("gain", (), nn.constant(2.0)))


def divided_rows(x, label):
    """The gradient of each row's loss is 1 over a sum, the same for all."""
    loss = mf.reduce_sum(mf.square(nn.Dense(3, name="d")(x)), 1)
    return {"loss": mf.reduce_sum(loss / mf.reduce_sum(mf.square(x)))}


@pytest.mark.parametrize("model", [scaled_rows, divided_rows])
def test_scalars_and_constants_spread_over_rows_are_made_for_a_micro_batch_at_a_time(model):
    graph = graph_of(model)
    differentiate(graph, mf.SGD(lr=0.1))
    timing = divide(graph, 4)
    wide = {n: s for n, s in timing.signatures.items() if n.outputs[0].shape[:1] == (ROWS,)}
    assert any(node.op.name == "Expand" for node in wide)
    for node, signature in wide.items():
        assert timing.loops[node], node.name
        assert signature.outputs == (S(0),), node.name


def refusal(model, parts=4):
    graph = graph_of(model, parts)
    differentiate(graph, mf.SGD(lr=0.1))
    with pytest.raises(CompileError) as caught:
        divide(graph, parts)
    return str(caught.value).splitlines()


def less_its_mean(x, label):
    y = nn.Dense(3, name="d")(x)
    return squares(y - mf.reduce_sum(y, 0) * (1 / ROWS))


def root(x, label):
    return {"loss": mf.sqrt(mf.mean(mf.square(nn.Dense(3, name="d")(x))))}


def over_rows(x, label):
    return squares(mf.softmax(mf.permute(nn.Dense(3, name="d")(x), (1, 0))))


def in_batch_pairs(x, label):
    y = nn.Dense(3, name="d")(x)
    return squares(y @ mf.permute(y, (1, 0)))


@pytest.mark.parametrize("model", [less_its_mean, root, over_rows, in_batch_pairs])
def test_a_value_of_the_whole_batch_that_depends_on_variables_is_refused_with_the_line(model):
    message, *lines = refusal(model)
    assert "of the whole batch, which depends on variable d." in message
    assert message.endswith("let it depend on the batch alone, or use one micro-batch")
    assert any("test_microbatch.py:" in line for line in lines)
    assert len(set(lines)) == len(lines)


def narrow(x):
    return mf.reduce_sum(mf.cast(x, "float16"), 0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_sum_in_16_bits_of_all_micro_batches_is_refused(kept):
    def model(x, label):
        given = narrow(x)
        wide = mf.cast(given, "float32")
        return squares(x - wide) | ({"sum": mf.reduce_sum(given)} if kept else {})

    graph = graph_of(model)
    if not kept:
        divide(graph, 4)  # the cast of each contribution is added up
        return
    with pytest.raises(CompileError, match=r"sum needs .* in float16 of the whole batch; cast it"):
        divide(graph, 4)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_gradients_in_16_bits_are_accumulated_in_float32(precision):
    job = replace(classifier(40), precision=precision, micro_batches=4)
    plan = compile_for("data=2", replace(job, evaluate=None))
    program = plan.program("train")
    tensors = plan.tensors(program)
    added = [t for t in program.tasks if t.op in ("Accumulate", "Collect")]
    assert len(added) >= 4
    assert not any(is_narrow(tensors[n].dtype) for t in added for n in (*t.inputs, *t.outputs))
    assert any(is_narrow(r.dtype) and t.phase == 1 for t in program.tasks
               for r in (tensors[n] for n in t.outputs))  # fmt: skip


def normed(group=None, micro_batches=1, batch=24):
    def model(batch):
        x = mf.cast(batch["image"], "float32") / 16
        x = nn.BatchNorm(group=group, name="norm")(nn.Dense(8, name="in")(x))
        return {"loss": mf.mean(mf.cross_entropy(nn.Dense(5, name="out")(x), batch["label"]))}

    train = mf.Dataset("train-*.h5", batch=batch)
    return mf.Job("normed", model, train=train, optimizer=mf.SGD(lr=0.1),
                  micro_batches=micro_batches)  # fmt: skip


def test_a_group_of_batch_norm_is_a_micro_batch_unless_given():
    def attributes(job):
        tasks = compile_for("data=1", job).program("train").tasks
        return {t.op: t.attributes for t in tasks if t.op.startswith("Batch")}

    assert attributes(normed(None, 3)) == attributes(normed(8, 3)) == attributes(normed(8, 1))
    assert attributes(normed(None, 3)) != attributes(normed(None, 1))


def identity_of(job):
    return dict(compile_for("data=1", job).identity)


def test_micro_batches_are_no_part_of_what_is_computed_unless_batch_norm_goes_by_them():
    plain = [replace(classifier(24), micro_batches=n, evaluate=None) for n in (1, 3)]
    assert identity_of(plain[0]) == identity_of(plain[1])
    assert identity_of(normed(None, 3)) == identity_of(normed(8, 1))
    assert identity_of(normed(None, 3)) != identity_of(normed(None, 1))


def test_sums_of_batch_norm_are_collected_for_its_running_statistics():
    program = compile_for("data=1", normed(None, 3)).program("train")
    collected = [t for t in program.tasks if t.op == "Collect"]
    moved = [t for t in program.tasks if t.op == "RunningMoments"]
    assert [t.phase for t in collected] == [1]
    assert [t.phase for t in moved] == [2]
    assert set(collected[0].outputs) <= set(moved[0].inputs)


def test_a_hint_names_axes_of_ranks_and_time_is_as_it_is():
    mesh = parse_mesh("data=2,model=2").in_time(3)
    x = Graph("train").input("x", (ROWS, 6), "float32")
    assert hinted({"model": S(1)}, mesh, x, S(0)) == (S(0), B, S(1))
    assert hinted(S(1), mesh, x, P) == (P, S(1), S(1))
    assert hinted(S(0), mesh, x, Partial("max")) == (Partial("max"), S(0), S(0))


def test_hints_are_followed_in_every_micro_batch():
    job = classifier(24, hidden="S(1)", last="S(0)")
    graph = trace(job, data_set("train", 540, 24), name="train", rows=24, training=True)
    differentiate(graph, job.optimizer)
    mesh = parse_mesh("model=2").in_time(3)
    placed = choose(graph, mesh, find_machine("cpu"), timing=divide(graph, 3))
    layouts = {t.name: layout for t, layout in placed.sources.items()}
    assert layouts["fc1.weight"] == (B, S(1))
    assert layouts["out.weight"] == (B, S(0))
    assert layouts["batch/image"][0] == S(0)


@pytest.mark.parametrize("count", [0, -2, 5, 48, True, 2.0])
def test_a_number_that_does_not_divide_the_batch_is_refused(count):
    with pytest.raises(JobError, match=r"a batch of 24 rows cannot be cut into .* micro-batches"):
        replace(classifier(24), micro_batches=count)


def test_more_micro_batches_than_can_be_planned_are_refused_with_how_many_can():
    with pytest.raises(CompileError, match=r"1048576 micro-batches .* take up to (\d+)$") as caught:
        compile_for("data=2", replace(classifier(2**20), micro_batches=2**20), rows=2**20)
    assert 10_000 < int(str(caught.value).rpartition(" ")[2]) < 2**20


def test_a_micro_batch_smaller_than_the_ranks_that_split_it_is_noted():
    job = replace(classifier(24), micro_batches=12, evaluate=None)
    idle = "a micro-batch of 2 rows is split over 3 ranks"
    assert any(idle in note for note in compile_for("data=3", job).notes)
    assert not any("have none" in note for note in compile_for("data=2", job).notes)


def test_no_axis_of_ranks_may_be_named_as_that_of_time():
    with pytest.raises(UsageError, match="'micro' is the axis of micro-batches"):
        parse_mesh("micro=2")
