"""A small classifier and its data in memory, compiled for any mesh and run on threads."""

import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD
from mpiflow.exec.failure import Failure
from mpiflow.exec.fake import Fake
from mpiflow.exec.feed import FeedLane
from mpiflow.exec.local import run_local
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import parse
from mpiflow.plan.places import ACCELERATOR, HOST
from mpiflow.plan.records import DataSet, Field

FEATURES, WIDTH, CLASSES, ROWS, TEST_ROWS = 6, 7, 5, 540, 133
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


ROUTE = ""
"""The route of plans that name none; "" for plans of the host. See --device in conftest.py."""


def data_set(name, rows, batch, features=FEATURES):
    fields = (Field("image", (features,), "uint8"), Field("label", (), "int64"))
    return DataSet(name, f"{name}-*.h5", fields, (), rows, batch, False, 0, 4, 4, "")


def classifier(batch=128, *, optimizer=None, width=WIDTH, hidden="S(1)", last="B"):
    """Dense, relu, Dense on uint8 images; hints say how an axis `model` splits the weights."""

    def hint(text):
        return text and {"model": parse(text)}

    def model(batch):
        x = mf.cast(batch["image"], "float32") / 16
        x = mf.relu(nn.Dense(width, name="fc1", sbp=hint(hidden))(x))
        logits = nn.Dense(CLASSES, name="out", sbp=hint(last))(x)
        hit = mf.equal(mf.argmax(logits), batch["label"])
        return {
            "loss": mf.mean(mf.cross_entropy(logits, batch["label"])),
            "accuracy": mf.mean(hit),
            "hits": mf.total(hit),
        }

    return mf.Job(
        "classifier",
        model,
        train=mf.Dataset("train-*.h5", batch=batch),
        evaluate=mf.Dataset("test-*.h5", batch=batch),
        optimizer=optimizer or mf.SGD(lr=0.1, momentum=0.9),
    )


def digits(batch=128):
    """The job of examples/digits.py."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import digits
    finally:
        sys.path.remove(str(EXAMPLES))
    return digits.job(batch=batch)


def target(mesh, machine=None, route="", **more):
    """What a plan is made for: ranks on CPUs, or by this route or that of --device fake."""
    route = route or ROUTE
    kind = ACCELERATOR if route else HOST
    return Target(parse_mesh(mesh), machine or find_machine("cpu"), kind, route, **more)


def compile_for(
    mesh,
    job,
    *,
    rows=ROWS,
    test_rows=TEST_ROWS,
    features=FEATURES,
    zero=0,
    machine=None,
    pipeline=ONE_FORWARD_ONE_BACKWARD,
    route="",
    memory=0,
    **more,
):
    """The plan of a job whose two data sets have these rows."""
    batch = job.train.batch
    data = {"train": data_set("train", rows, batch, features)}
    data |= {name: data_set(name, test_rows, batch, features) for name in job.evaluations}
    wanted = target(mesh, machine, route, zero=zero, memory=memory, pipeline=pipeline)
    return compile_job(job, data, wanted, **more)


def compile_arrays(mesh, job, arrays, zero=0, pipeline=ONE_FORWARD_ONE_BACKWARD, route=""):
    """The plan of a job, without its evaluations, that trains on the rows of these arrays."""
    fields = tuple(Field(name, a.shape[1:], a.dtype.name) for name, a in arrays.items())
    rows = len(next(iter(arrays.values())))
    train = DataSet("train", "rows-*.h5", fields, (), rows, job.train.batch, False, 0, 4, 4, "")
    wanted = target(mesh, route=route, zero=zero, pipeline=pipeline)
    return compile_job(replace(job, evaluate=None), {"train": train}, wanted)


@cache
def classifier_plan(mesh, batch=128, test_rows=TEST_ROWS, **job):
    return compile_for(mesh, classifier(batch, **job), test_rows=test_rows)


@cache
def digits_plan(mesh, batch=128):
    return compile_for(
        mesh, digits(batch), rows=1437, test_rows=360, features=64, folder=EXAMPLES.parent
    )


@cache
def data(rows, seed=0, features=FEATURES):
    """Images and labels that a linear map of the images decides, by rows."""
    draw = np.random.default_rng(seed)
    image = draw.integers(0, 17, (rows, features)).astype(np.uint8)
    label = (image @ np.random.default_rng(5).standard_normal((features, CLASSES))).argmax(1)
    return {"image": image, "label": label.astype(np.int64)}


class MemoryReader:
    """A reader (plan.protocols) of arrays, in their order, beginning again at the end."""

    reading = ""

    def __init__(self, arrays, batch):
        self.arrays, self.batch = arrays, batch

    def read(self, step, rows, out):
        for name, array in self.arrays.items():
            if name in out:
                chosen = np.arange(rows[0], rows[1]) + step * self.batch
                np.take(array, chosen % len(array), axis=0, out=out[name])

    def describe(self, step, row):
        return f"memory row {step * self.batch + row}"


def readers_of(plan):
    return {d.name: MemoryReader(data(d.rows, seed=i, features=d.fields[0].shape[0]), d.batch)
            for i, d in enumerate(plan.data)}  # fmt: skip


def plant(session, program, op, turn):
    """Let the kernels of an op fail in their run `turn`, counted from now."""
    runs = iter(range(turn, -1, -1))

    def fail():
        if next(runs) == 1:
            raise TypeError("planted")

    look(session, program, op, fail)


def look(session, program, op, function):
    """Call a function before each kernel of an op, on the thread of kernels."""

    def both(call):
        def work():
            function()
            call()

        return work

    for step in session._programs[program].steps:
        lane = step.kernels
        lane.segments = tuple(
            replace(segment, calls=tuple(
                both(call) if task.op == op else call
                for task, call in zip(segment.tasks, segment.calls, strict=True)
            ))
            for segment in lane.segments
        )  # fmt: skip


def device_of(plan, rank, seed=0):
    """What runs the plan on a rank: None for one of the host, else a fake device."""
    assert not ROUTE or plan.device == ACCELERATOR, "--device fake: compile it for `jobs.target`"
    return Fake(f"{seed}/{rank}") if plan.device == ACCELERATOR else None


def on_ranks(plan, work, readers=None, seed=0):
    """What `work(session)` gives on each rank, with the first failure raised."""
    readers = readers or readers_of(plan)

    def rank(transport):
        failure = Failure(transport)
        session = Session(plan, transport, readers, start_thread=failure.start_thread,
                          device=device_of(plan, transport.rank, seed))  # fmt: skip
        try:
            session.run("initialise")
            result = work(session)
            session.close()
        finally:
            # A reader that finds a planted fault now would end the process, as nobody listens.
            failure._taken.set()
        return result

    return run_local(plan.mesh.size, rank)


def train(session, steps):
    """The outputs of the first steps."""
    session.expect("train", range(steps))
    return [session.run("train", step) for step in range(steps)]


def evaluate(session):
    """(rows, outputs) of each step of an evaluation of the whole test set."""
    test = session.plan.dataset("evaluate")
    full, left = divmod(test.rows, test.batch)
    found = []
    for name, steps, rows in [
        ("evaluate", range(full), test.batch), ("evaluate_tail", range(full, full + 1), left)
    ]:  # fmt: skip
        if session.has(name):
            session.expect(name, steps)
            found += [(rows, session.run(name, step)) for step in steps]
    return found


@contextmanager
def fed_when_read():
    """What feeds the next step to a device waits until as much of it is read as can be."""
    plain = FeedLane.move

    def move(lane):
        read, deadline = lane.read, time.monotonic() + 10
        while lane.early and read.pending and not lane.is_read(lane.started + 1):
            if read.filled - read.acknowledged >= read.ahead:
                break
            assert time.monotonic() < deadline
            time.sleep(1e-4)
        return plain(lane)

    FeedLane.move = move
    try:
        yield
    finally:
        FeedLane.move = plain


def with_program(plan, name, change):
    """The plan with one program replaced by what `change` makes of it."""
    programs = [change(p) if p.name == name else p for p in plan.programs]
    return replace(plan, programs=tuple(programs))


PLANS = {
    "digits on 2": lambda: digits_plan("data=2"),
    "model=3": lambda: classifier_plan("model=3", 130),
    "data=2,model=2": lambda: classifier_plan("data=2,model=2"),
}
"""What makes whole plans, by what they are called."""
