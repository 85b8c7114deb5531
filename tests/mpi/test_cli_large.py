"""Very many identities, and a table whose rows travel by owner, through the command line."""

import numpy as np
import pytest
from cli_job import Runner, relative, steps_of

from mpiflow.io.pack import pack
from mpiflow.plan.rows import FETCH
from mpiflow.plan.store import load

JOB = """
import mpiflow as mf
from mpiflow import nn
from mpiflow.models.faces import Faces


def job() -> mf.Job:
    faces = Faces(None, 100_000, 8, "arc", 0.3, 16.0)

    def model(batch):
        seen = nn.Embedding(30_001, 64, name="seen", sbp=mf.S(0), sparse=True)(batch["seen"])
        features = mf.normalise(nn.Dense(8, name="features")(mf.reduce_sum(mf.tanh(seen), 1)))
        return {"loss": faces.loss(faces.cosines(features), batch["label"])}

    train = mf.Dataset("faces-*.h5", batch=60, shuffle=True, lanes=4)
    return mf.Job("faces", model, train=train, optimizer=mf.Adagrad(0.1), epochs=2)
"""
ROWS = 300


@pytest.mark.ranks(2)
def test_a_hundred_thousand_identities_train_alike_on_one_rank_and_on_two(mpiexec, tmp_path):
    draw = np.random.default_rng(0)
    seen = (draw.zipf(1.2, (ROWS, 60)) % 30_001).astype(np.int32)
    label = draw.integers(0, 100_000, ROWS).astype(np.int32)
    pack({"seen": seen, "label": label}, f"{tmp_path}/faces-*.h5", shards=[170, 130])
    (tmp_path / "job.py").write_text(JOB)
    run = Runner(mpiexec, tmp_path)
    alone = steps_of(run.train(1, "--steps", "2", out="alone"))
    both = steps_of(run.train(2, "--steps", "2", out="both"))
    assert relative(both, alone) < 1e-5
    plan = load(next((tmp_path / "both").glob("*.plan")))
    assert any(task.op == FETCH for task in plan.program("train").tasks)
    assert all(str(v.layout[0]) == "S(0)" for v in plan.variables if "classes" in v.name)
    # What two ranks saved, one rank goes on from.
    resumed = steps_of(run.train(1, "--steps", "3", out="both"))
    assert relative(resumed[:2], alone) < 1e-5
    assert len(resumed) == 3
