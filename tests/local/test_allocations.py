"""Steps that have warmed up keep nothing, and allocate nothing of the size of an activation."""

import tracemalloc
from dataclasses import replace

import jobs
import pytest
from jobs import classifier_plan, compile_for, on_ranks, readers_of

import mpiflow as mf
from mpiflow import nn


def images():
    """A job with the ops whose kernels work in blocks, on activations of a quarter MB."""

    def model(batch):
        x = mf.reshape(mf.cast(batch["image"], "float32") / 16, (-1, 1, 24, 24))
        x = mf.relu(nn.Conv(8, 3, padding="same", name="conv")(x))
        x = nn.Conv(8, 3, padding="same", groups=8, name="depthwise")(x)
        x = mf.max_pool(mf.max_pool(x, 3, stride=2, padding=1), 2)
        x = nn.GroupNorm(4, name="group")(x)
        x = mf.gelu(nn.LayerNorm(name="norm")(mf.reshape(x, (-1, 8 * 36))))
        x = nn.Dropout(0.25)(x)
        logits = nn.Dense(5, name="out")(mf.softmax(x))
        rows = mf.cross_entropy(logits, batch["label"], smoothing=0.1, ignore=3)
        return {"loss": mf.mean(rows)}

    return mf.Job(
        "images", model, train=mf.Dataset("train-*.h5", batch=16), optimizer=mf.AdamW(lr=0.1)
    )


def classifier():
    """Arrays of 128 KB and more."""
    return classifier_plan("data=1", width=256)


def micro_batches():
    """The same arrays, four times a step."""
    job = replace(jobs.classifier(512, width=256), micro_batches=4, evaluate=None)
    return compile_for("data=1", job)


CASES = [
    (classifier, 50, 50_000),  # the test's own reader, and the outputs
    (lambda: compile_for("data=1", images(), features=576), 15, 150_000),  # and NumPy's buffers
    (micro_batches, 15, 50_000),
]


@pytest.mark.host  # the fake device writes down every use
@pytest.mark.parametrize(
    ("plan", "window", "limit"), CASES, ids=["classifier", "images", "micro_batches"]
)
def test_steady_steps_allocate_no_array(plan, window, limit):
    made = plan()
    warm = window + 10

    def work(session):
        session.expect("train", range(warm + 3 * window))
        for step in range(warm):
            session.run("train", step)
        found = []
        tracemalloc.start()
        try:
            for first in range(warm, warm + 3 * window, window):
                begin = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                for step in range(first, first + window):
                    session.run("train", step)
                now, peak = tracemalloc.get_traced_memory()
                found.append((now - begin, peak - begin))
        finally:
            tracemalloc.stop()
        return found

    grown, peaks = zip(*on_ranks(made, work, readers_of(made))[0], strict=True)
    # An array kept a step, of 112 bytes without its data, would show in every window.
    assert min(grown) < 100 * window
    assert min(peaks) < limit
