"""The example models lose the same in pipeline stages as on one rank, over ten steps."""

from dataclasses import replace

import numpy as np
import pytest
from jobs import EXAMPLES, MemoryReader, compile_arrays, on_ranks, train
from test_example_models import CASES, losses

from mpiflow.compiler.pipeline import Pipeline
from mpiflow.graph.mesh import parse_mesh
from mpiflow.jobfile import load_job

STEPS = 10
STAGED = [
    ("digits", "stage=2", 1, "1f1b", 0),
    ("digits", "stage=3,data=2", 7, "gpipe", 1),
    ("gpt", "stage=2,data=2", 2, "interleaved", 0),
    ("gpt", "stage=3", 6, "zero-bubble", 0),
    ("gpt", "stage=2,model=2", 3, "1f1b", 3),
    ("bert", "stage=4", 3, "1f1b", 0),
    ("bert", "stage=2,data=3", 2, "zero-bubble", 2),
    ("resnet", "stage=2", 1, "1f1b", 0),
    ("resnet", "stage=5", 1, "1f1b", 0),
    ("resnet", "data=2,stage=2", 1, "1f1b", 1),
    ("faces", "stage=2,data=2", 1, "1f1b", 0),
    ("widedeep", "stage=2,data=2", 4, "1f1b", 0),
    ("field", "stage=3", 6, "gpipe", 0),
    ("digits", "stage=3,data=1+3+2", 7, "gpipe", 1),
    ("gpt", "stage=2,data=1+2,model=2+1", 2, "interleaved", 0),
    ("bert", "stage=3,data=1+2+1", 3, "1f1b", 0),
    ("faces", "stage=2,data=1+2", 1, "1f1b", 0),
]
"""Tied embeddings, batch statistics, sampled classes, tables by rows; 2 to 6 ranks."""


@pytest.mark.parametrize(
    ("case", "mesh", "micro_batches", "schedule", "zero"),
    [pytest.param(*c, marks=pytest.mark.ranks(parse_mesh(c[1]).size)) for c in STAGED],
)
def test_losses_are_those_of_one_rank(case, mesh, micro_batches, schedule, zero):
    example, settings, rows = CASES[case]
    job, _ = load_job(str(EXAMPLES / f"{example}.py"), settings)
    arrays = rows()
    pipeline = Pipeline(schedule, 2 if schedule == "interleaved" else 1)
    made = replace(job, micro_batches=micro_batches)
    plan = compile_arrays(mesh, made, arrays, zero, pipeline)
    readers = {"train": MemoryReader(arrays, job.train.batch)}
    found = on_ranks(plan, lambda session: [o["loss"] for o in train(session, STEPS)], readers)
    assert all(other == found[0] for other in found)
    tolerance = 1e-8 if "dtype=float64" in settings else 1e-4
    np.testing.assert_allclose(found[0], losses(case, "data=1"), rtol=tolerance)
