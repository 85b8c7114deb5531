"""Every example trains on two ranks with nothing but its file, and plans its full size."""

import json

import numpy as np
import pytest
from cli_job import ROOT, evaluations_of, steps_of

from mpiflow.cli import main
from mpiflow.plan.store import load

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


def transformer_flops(parameters, layers, width, tokens):
    """Of a training step, a row: 6 a parameter and token, and 6 products of t x t x width a layer.

    A product of the forward pass has two in the backward pass; an operation is half a multiply-add.
    """
    return 6 * parameters * tokens + 12 * layers * tokens**2 * width


RGB = ("size=224", "channels=3", "classes=1000")
FULL = {
    "gpt": ("gpt", ("size=small",), 124_439_808, transformer_flops(124_439_808, 12, 768, 1024)),
    "bert": (
        "bert",
        ("size=base",),
        110_106_428,
        transformer_flops(110_106_428, 12, 768, 512) - 6 * 768 * 30_522 * (512 - 76),
    ),  # logits of the 76 tokens that are to be found
    "resnet50": ("images", ("model=resnet50", *RGB), 25_557_032, 6 * 4.09e9),
    "vgg16": ("images", ("model=vgg16", *RGB), 138_357_544, 6 * 15.47e9),
    "alexnet": ("images", ("model=alexnet", *RGB), 61_100_840, None),
    "widedeep": ("widedeep", ("table=1000000000",), None, None),
    "faces": ("faces", ("classes=1000000",), None, None),
    "field": ("field", ("size=512",), None, None),
}
"""Model -> example, settings, parameters and operations of a training step, a row, as published."""


@pytest.mark.host("plans for the host alone")
@pytest.mark.parametrize("model", FULL)
def test_a_full_size_is_planned_without_files(tmp_path, capsys, monkeypatch, model):
    example, settings, parameters, flops = FULL[model]
    monkeypatch.chdir(tmp_path)
    options = [part for setting in settings for part in ("--set", setting)]
    options += ["--ranks", "4", "--json", "-o", "made.plan"]
    code = main(["plan", str(EXAMPLES / f"{example}.py"), *options])
    made = json.loads(capsys.readouterr().out)
    assert code == 0, made
    assert made["predicted"]["peak_bytes"]["host"] > 4 * made["parameters"] / 4
    assert [path.name for path in tmp_path.iterdir()] == ["made.plan"]
    if parameters:
        assert made["parameters"] == parameters
    if flops:
        train = load("made.plan").program("train")
        assert 4 * sum(task.flops for task in train.tasks) == pytest.approx(
            flops * train.rows, rel=0.02
        )


@pytest.mark.host("plans for the host alone")
@pytest.mark.parametrize("example", RUNS)
def test_an_example_is_planned_in_16_bits(tmp_path, capsys, example):
    options = [part for setting in RUNS[example] for part in ("--set", setting)]
    options += ["--set", "precision=bfloat16", "--data", str(tmp_path)]
    code = main(["plan", str(EXAMPLES / f"{example}.py"), "--ranks", "2", *options, "--json"])
    assert code == 0, capsys.readouterr().out
