from dataclasses import replace

import numpy as np
import pytest
import reference
from jobs import (
    MemoryReader,
    classifier_plan,
    compile_for,
    data,
    device_of,
    evaluate,
    on_ranks,
    plant,
    train,
)

import mpiflow as mf
from mpiflow import nn
from mpiflow.errors import DataError, PlanError, TaskError
from mpiflow.exec.local import run_local
from mpiflow.exec.session import Session
from mpiflow.plan.traffic import bytes_sent


def ranks(*values):
    """Cases marked with the number of ranks that their mesh, the first value, has."""
    return [
        pytest.param(*v, marks=pytest.mark.ranks(size_of(v[0])), id="-".join(map(str, v)))
        for v in (value if isinstance(value, tuple) else (value,) for value in values)
    ]


def size_of(mesh):
    return int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))


@pytest.mark.host
@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_kernels_have_a_thread_where_the_plan_says_that_messages_can_be_hidden(overlap):
    plan = replace(classifier_plan("data=2"), overlap=overlap)

    def work(session):
        found = train(session, 3)
        return found, "compute" in session._streams

    (found, beside), _ = on_ranks(plan, work)
    assert beside == overlap
    assert [step["loss"] for step in found] == losses(classifier_plan("data=2"), 3)


def losses(plan, steps=10):
    """The loss of each step, which every rank gives alike."""
    by_rank = on_ranks(plan, lambda session: [o["loss"] for o in train(session, steps)])
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


# 128 rows divide among 2 and 4 ranks, 130 among 2 only.
CASES = [
    ("data=1", 130), ("data=2", 130), ("data=3", 128), ("data=4", 130), ("data=6", 128),
    ("model=2", 128), ("model=3", 130), ("model=4", 128), ("model=6", 130),
    ("data=2,model=2", 128), ("data=2,model=3", 130),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "batch"), ranks(*CASES))
def test_losses_do_not_depend_on_the_ranks(mesh, batch):
    alone = losses(classifier_plan("data=1", batch))
    assert losses(classifier_plan(mesh, batch)) == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("hidden", "last"), [("S(0)", "B"), ("B", "S(1)"), ("S(1)", "S(0)")])
def test_losses_do_not_depend_on_how_weights_are_split(hidden, last):
    plan = classifier_plan("model=3", 130, hidden=hidden, last=last)
    layouts = {v.name: str(v.layout[0]) for v in plan.variables}
    assert (layouts["fc1.weight"], layouts["out.weight"]) == (hidden, last)
    assert losses(plan) == pytest.approx(losses(classifier_plan("data=1", 130)), rel=1e-5)


OPTIMIZERS = [
    mf.SGD(lr=0.1),
    mf.SGD(lr=0.1, weight_decay=0.01),
    mf.SGD(lr=0.05, momentum=0.9),
    mf.SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
]


@pytest.mark.parametrize("mesh", ranks("data=1", "data=3"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_training_follows_a_reference_in_numpy(mesh, optimizer):
    plan = classifier_plan(mesh, 130, optimizer=optimizer)

    def work(session):
        weights = {v.name: session.variables[v.name].copy() for v in plan.variables if v.trainable}
        return weights, [o["loss"] for o in train(session, 10)], dict(session.variables)

    weights, found, after = on_ranks(plan, work)[0]
    rows = data(540)
    batches = [
        (rows["image"].take(chosen, 0, mode="wrap"), rows["label"].take(chosen, 0, mode="wrap"))
        for chosen in np.arange(1300).reshape(10, 130)
    ]
    settings = {n: getattr(optimizer, n) for n in ("lr", "momentum", "weight_decay", "nesterov")}
    assert found == pytest.approx(reference.train(weights, batches, **settings), rel=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(after[name], weight, rtol=1e-4, atol=1e-6)


EVALUATIONS = [
    # Of 128 rows a batch: tails of 5 and of 1 row (empty spans), a tail alone, no tail.
    *((mesh, rows) for mesh in ("data=1", "data=3", "data=6") for rows in (133, 129, 100, 256)),
    ("model=4", 133), ("data=2,model=2", 133),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "test_rows"), ranks(*EVALUATIONS))
def test_an_evaluation_counts_every_row_once(mesh, test_rows):
    plan = classifier_plan(mesh, 128, test_rows)

    def work(session):
        train(session, 3)
        return evaluate(session), {n: v.copy() for n, v in session.variables.items()}

    results = on_ranks(plan, work)
    steps = results[0][0]
    assert all(found == steps for found, _ in results)
    assert sum(rows for rows, _ in steps) == test_rows
    weights = whole_variables(plan, [variables for _, variables in results])
    rows = data(test_rows, seed=1)
    logits = reference.forward(weights, rows["image"])[2]
    loss = cross_entropy(logits, rows["label"])
    hits = int((logits.argmax(1) == rows["label"]).sum())
    assert sum(values["hits"] for _, values in steps) == hits
    mean = {
        name: sum(n * values[name] for n, values in steps) / test_rows
        for name in ("loss", "accuracy")
    }
    assert mean["accuracy"] == pytest.approx(hits / test_rows, rel=1e-6)
    assert mean["loss"] == pytest.approx(loss, rel=1e-5)


def cross_entropy(logits, label):
    shifted = logits - logits.max(1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(label)), label]).mean())


def whole_variables(plan, by_rank):
    """Every variable put together from what the ranks hold."""
    found = {}
    for variable in plan.variables:
        whole = np.full(variable.shape, np.nan, variable.dtype)
        for rank, variables in enumerate(by_rank):
            box = plan.slice(rank).box(variable)
            whole[tuple(slice(a, b) for a, b in box)] = variables[variable.name]
        assert not np.isnan(whole).any()
        found[variable.name] = whole
    return found


@pytest.mark.parametrize(("mesh", "batch"), ranks(*CASES[1:]))
def test_initial_weights_are_the_same_numbers_under_every_layout(mesh, batch):
    def work(session):
        return {n: v.copy() for n, v in session.variables.items()}

    alone = on_ranks(classifier_plan("data=1"), work)[0]
    plan = classifier_plan(mesh, batch)
    for name, whole in whole_variables(plan, on_ranks(plan, work)).items():
        np.testing.assert_array_equal(whole, alone[name])


@pytest.mark.parametrize(("mesh", "batch"), ranks(*CASES))
def test_memory_and_traffic_are_predicted_exactly(mesh, batch):
    plan = classifier_plan(mesh, batch)

    def work(session):
        sent = []
        for run in (lambda: train(session, 1), lambda: train(session, 1), lambda: eval_(session)):
            before = session.sent
            run()
            sent.append(session.sent - before)
        return session.arena.peak, sent

    def eval_(session):
        session.expect("evaluate", range(1))
        session.run("evaluate")

    results = on_ranks(plan, work)
    assert max(peak for peak, _ in results) == plan.arena()
    most = [max(step) for step in zip(*(sent for _, sent in results), strict=True)]
    expected = [bytes_sent(plan, plan.program(p)) for p in ("train", "train", "evaluate")]
    assert most == expected
    assert (expected[0] > 0) == (plan.mesh.size > 1)


class Collector:
    """A writer that notes how often each element of each variable was written, and what."""

    def __init__(self, plan):
        self.values = {v.name: np.full(v.shape, np.nan, v.dtype) for v in plan.variables}
        self.counts = {v.name: np.zeros(v.shape, int) for v in plan.variables}
        self.finished = 0

    def write(self, variable, start, array):
        place = tuple(slice(a, a + n) for a, n in zip(start, array.shape, strict=True))
        self.values[variable][place] = array
        self.counts[variable][place] += 1

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize(("mesh", "batch"), ranks(*CASES))
def test_a_save_writes_every_element_exactly_once_as_it_was(mesh, batch):
    plan = classifier_plan(mesh, batch)
    writer = Collector(plan)

    def work(session):
        train(session, 2)
        before = {n: v.copy() for n, v in session.variables.items()}
        session.save(writer)
        session.expect("train", range(2, 5))  # the next steps go on beside the writing
        for step in range(2, 5):
            session.run("train", step)
        return before

    wholes = whole_variables(plan, on_ranks(plan, work))
    assert writer.finished == plan.mesh.size
    for name, whole in wholes.items():
        assert (writer.counts[name] == 1).all()
        np.testing.assert_array_equal(writer.values[name], whole)


@pytest.mark.ranks(2)
def test_a_failing_kernel_names_rank_step_task_and_line():
    plan = classifier_plan("data=2")

    def work(session):
        if session.transport.rank == 1:
            plant(session, "train", "Relu", 2)
        train(session, 3)

    with pytest.raises(TaskError) as caught:
        on_ranks(plan, work)
    message = str(caught.value)
    assert message.startswith("rank 1")
    assert "program train, step 2, task relu (Relu): TypeError" in message
    assert "jobs.py:" in message.splitlines()[-1]


@pytest.mark.ranks(3)
def test_labels_out_of_range_are_refused_with_their_rows():
    plan = classifier_plan("data=3", 130)
    rows = {name: array.copy() for name, array in data(540).items()}
    rows["label"][[130 + 44, 130 + 80, 130 + 81]] = 5, -1, 99
    readers = {"train": MemoryReader(rows, 130)}
    with pytest.raises(DataError) as caught:
        on_ranks(plan, lambda session: train(session, 3), readers)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 1")  # which has rows 44 to 86
    assert "step 2, read train: field 'label' must lie in 0..4" in lines[0]
    assert lines[1:] == [
        "  memory row 174: 5", "  memory row 210: -1", "  memory row 211: 99"
    ]  # fmt: skip


def test_the_largest_legal_labels_are_accepted():
    rows = {"image": data(540)["image"], "label": np.full(540, 4)}
    plan = classifier_plan("data=1")
    on_ranks(plan, lambda session: train(session, 2), {"train": MemoryReader(rows, 128)})


@pytest.mark.ranks(2)
def test_a_step_gives_python_floats_that_are_equal_on_all_ranks():
    first, second = on_ranks(classifier_plan("data=2"), lambda session: train(session, 2))
    assert first == second
    assert {type(v) for step in first for v in step.values()} == {float}
    assert list(first[0]) == ["loss", "accuracy", "hits"]
    assert 0 <= first[0]["hits"] <= 128
    assert first[0]["accuracy"] == pytest.approx(first[0]["hits"] / 128)


@pytest.mark.ranks(2)
def test_the_ranks_of_the_plan_must_be_there():
    with pytest.raises(PlanError, match="the plan is for 2 ranks, there are 3"):
        run_local(3, lambda transport: Session(classifier_plan("data=2"), transport))


def test_a_program_without_its_reader_is_refused():
    plan = classifier_plan("data=1")

    def work(transport):
        return Session(plan, transport, device=device_of(plan, 0)).run("train")

    with pytest.raises(PlanError, match="program train reads data set 'train': no reader"):
        run_local(1, work)


@pytest.mark.ranks(2)
def test_steps_read_ahead_can_be_forgotten_and_read_again():
    plan = classifier_plan("data=2")

    def work(session):
        session.expect("train", range(6))
        first = [session.run("train", step)["loss"] for step in range(3)]
        session.forget("train")
        session.expect("train", range(3, 6))
        return first + [session.run("train", step)["loss"] for step in range(3, 6)]

    assert on_ranks(plan, work)[0] == losses(plan, 6)


@pytest.mark.ranks(2)
def test_training_goes_on_after_evaluations_as_if_there_were_none():
    plan = classifier_plan("data=2")

    def work(session):
        session.expect("train", range(8))
        found = []
        for step in range(8):
            found.append(session.run("train", step)["loss"])
            if step % 3 == 1:
                evaluate(session)
        return found

    assert on_ranks(plan, work)[0] == losses(plan, 8)


@pytest.mark.ranks(3)
def test_a_share_of_hits_is_the_same_number_on_any_ranks():
    """The count is summed over the ranks before it is divided: 1/n is rounded once."""

    def shares(mesh):
        results = on_ranks(classifier_plan(mesh, 130), evaluate)
        return [outputs["accuracy"] for _, outputs in results[0]]

    assert shares("data=1") == shares("data=2") == shares("data=3")


def test_a_field_that_a_model_asks_for_and_does_not_use_is_not_read():
    def model(batch):
        batch["label"] + 1
        x = nn.Dense(1, name="fc")(mf.cast(batch["image"], "float32"))
        return {"loss": mf.mean(mf.square(x)), "ones": mf.mean(mf.equal(batch["image"], 1))}

    job = mf.Job("one-field", model, train=mf.Dataset("train-*.h5", batch=8), optimizer=mf.SGD(0.0))
    plan = compile_for("data=2", job)
    read = next(t for t in plan.program("train").tasks if t.kind == "read")
    assert read.attributes["fields"] == ["image"]
    outputs = on_ranks(plan, lambda session: train(session, 2))[0][-1]
    assert outputs["loss"] > 0
    assert 0 < outputs["ones"] < 1
