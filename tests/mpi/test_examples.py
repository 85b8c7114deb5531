"""Every example trains on two ranks with nothing but its file, and plans its full size."""

import json

import numpy as np
import pytest
from cli_job import ROOT, evaluations_of, steps_of

from mpiflow.cli import main

EXAMPLES = ROOT / "examples"
RUNS = {
    "gpt": ("vocabulary=64", "batch=32", "warmup=5", "lr=0.01"),
    "images": ("classes=4", "batch=64", "warmup=5"),
    "bert": ("vocabulary=64", "batch=32", "warmup=5"),
    "faces": ("classes=8", "batch=32", "warmup=5"),
    "widedeep": ("table=50", "batch=512"),
    "field": ("size=8", "batch=32"),
}
"""Example -> settings with which it learns within STEPS."""
STEPS = 40


@pytest.mark.ranks(2)
@pytest.mark.parametrize("example", RUNS)
def test_an_example_makes_its_data_and_learns(mpiexec, tmp_path, example):
    settings = [part for setting in RUNS[example] for part in ("--set", setting)]
    done = mpiexec(
        2, "-m", "mpiflow", "run", EXAMPLES / f"{example}.py", "--data", tmp_path,
        "--out", tmp_path / "run", "--steps", STEPS, *settings, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("has no files: packing") == 1
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    loss = [row["loss"] for row in steps_of(rows)]
    assert len(loss) == STEPS
    assert np.mean(loss[-5:]) < 0.9 * np.mean(loss[:3])
    assert evaluations_of(rows)[-1]["rows"] > 0


@pytest.mark.parametrize(
    ("example", "parameters", "settings"),
    [
        ("gpt", 124_439_808, ("size=small",)),
        ("images", 61_100_840, ("model=alexnet", "size=224", "channels=3", "classes=1000")),
        ("images", 138_357_544, ("model=vgg16", "size=224", "channels=3", "classes=1000")),
        ("bert", 110_106_428, ("size=base",)),
        ("widedeep", None, ("table=1000000000",)),
        ("faces", None, ("classes=1000000",)),
        ("field", None, ("size=512",)),
    ],
)
def test_a_full_size_is_planned_without_files(
    tmp_path, capsys, monkeypatch, example, parameters, settings
):
    monkeypatch.chdir(tmp_path)
    options = [part for setting in settings for part in ("--set", setting)]
    code = main(["plan", str(EXAMPLES / f"{example}.py"), "--ranks", "4", *options, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert code == 0, made
    if parameters:
        assert made["parameters"] == parameters
    assert made["predicted"]["peak_bytes"]["host"] > 4 * made["parameters"] / 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("example", RUNS)
def test_an_example_is_planned_in_16_bits(tmp_path, capsys, example):
    options = [part for setting in RUNS[example] for part in ("--set", setting)]
    options += ["--set", "precision=bfloat16", "--data", str(tmp_path)]
    code = main(["plan", str(EXAMPLES / f"{example}.py"), "--ranks", "2", *options, "--json"])
    assert code == 0, capsys.readouterr().out
