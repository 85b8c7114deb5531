"""Which checkpoint is chosen when some are damaged, and what restoring refuses."""

import json
import os
import re
import shutil
from contextlib import suppress

import numpy as np
import pytest
from checkpoint_parts import IDENTITY, assert_equal, load_ranks, save, values

from mpiflow.errors import CheckpointError
from mpiflow.io.checkpoint.info import describe, info
from mpiflow.io.checkpoint.manifest import load
from mpiflow.io.checkpoint.read import (
    CheckpointReader,
    newest,
    require_program,
    require_variables,
    restore,
    verify,
)
from mpiflow.io.checkpoint.records import SavedVariable
from mpiflow.io.checkpoint.write import prepare


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """Syncing takes most of the time and shows only when the power fails."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def pair(tmp_path):
    """A folder with checkpoints of steps 40 (seed 1) and 50 (seed 2)."""
    save(tmp_path, 40, values(1), (2,))
    save(tmp_path, 50, values(2), (3,))
    return tmp_path


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def truncate(path, size):
    os.truncate(path, size)


# -- choosing -----------------------------------------------------------------------------------


def test_the_newest_complete_one_is_chosen(pair):
    found, skipped = newest(pair)
    assert (found.step, skipped) == (50, [])
    assert_equal(load_ranks(found, (2,)), values(2))


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert newest(tmp_path / "absent") == (None, [])


def test_other_things_in_the_folder_are_left_alone(pair):
    (pair / "notes.txt").write_text("mine")
    (pair / "step-5").mkdir()
    (pair / "step-00000030.removed").mkdir()
    found, skipped = newest(pair)
    assert (found.step, skipped) == (50, [])


SHALLOW = {
    "truncated": (lambda p: truncate(p / "shard-00001.h5", 100), r"has 100 bytes, \d+ expected"),
    "empty": (lambda p: truncate(p / "shard-00000.h5", 0), r"has 0 bytes, \d+ expected"),
    "deleted": (lambda p: (p / "shard-00002.h5").unlink(), r"No such file.*\d+ bytes expected"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "empty manifest": (lambda p: truncate(p / "manifest.json", 0), "manifest.json: cannot be read"),
    "half a manifest": (lambda p: truncate(p / "manifest.json", 999), "cannot be read"),
    "wrong manifest": (
        lambda p: shutil.copy(p.parent / "step-00000040" / "manifest.json", p),
        "holds step 40, its folder step 50",
    ),
    "a link": (
        lambda p: ((p / "shard-00000.h5").unlink(), (p / "shard-00000.h5").symlink_to("/dev/zero")),
        "not a regular file",
    ),
    "only a partial": (lambda p: p.rename(f"{p}.partial"), "partial; saving ended before"),
    "a file": (lambda p: (shutil.rmtree(p), p.write_text("x")), "cannot be read"),
}


@pytest.mark.parametrize(("damage", "reason"), SHALLOW.values(), ids=SHALLOW)
def test_a_damaged_newest_is_skipped_with_the_reason(pair, damage, reason):
    damage(pair / "step-00000050")
    found, skipped = newest(pair)
    assert found.step == 40
    assert_equal(load_ranks(found, (3,)), values(1))
    assert len(skipped) == 1
    assert "step-00000050" in skipped[0]
    assert re.search(reason, skipped[0])


def test_none_is_chosen_when_all_are_damaged(pair):
    for path in pair.glob("*/shard-00000.h5"):
        path.unlink()
    found, skipped = newest(pair)
    assert found is None
    assert len(skipped) == 2


def test_every_flipped_byte_of_a_shard_is_found(tmp_path):
    arrays = {"w": np.arange(5.0), "step": np.array(3)}
    checkpoint = load(save(tmp_path, 40, arrays, (1,)))
    path = checkpoint.path / "shard-00000.h5"
    assert verify(checkpoint) == []
    for at in range(0, path.stat().st_size, 37):
        flip(path, at)
        (fault,) = verify(checkpoint)
        assert "shard-00000.h5" in fault
        flip(path, at)
    assert verify(checkpoint) == []


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = save(tmp_path, 40, {"w": np.arange(2.0)}, (1,))
    before = load(path)
    for at in range((path / "manifest.json").stat().st_size):
        flip(path / "manifest.json", at)
        with suppress(CheckpointError):
            assert load(path) == before
        flip(path / "manifest.json", at)


def test_a_flipped_payload_byte_is_refused_when_loading_and_skipped_when_deep(pair):
    checkpoint = load(pair / "step-00000050")
    piece = next(s for s in checkpoint.slices if s.variable == "fc1.weight" and s.start[0] > 0)
    flip(checkpoint.path / piece.file, piece.offset + piece.nbytes - 1)
    assert newest(pair)[0].step == 50
    with pytest.raises(CheckpointError, match=r"'fc1.weight' from \(2, 0\), is damaged: sha256"):
        restore(checkpoint, "fc1.weight", ((0, 5), (0, 1)), np.empty((5, 1), "float32"))
    restore(checkpoint, "fc1.weight", ((0, 2), (0, 1)), np.empty((2, 1), "float32"))
    found, skipped = newest(pair, deep=True)
    assert found.step == 40
    assert [piece.file in line for line in skipped] == [True]


def test_one_of_a_step_being_replaced_counts_while_the_new_one_has_no_name(pair):
    (pair / "step-00000050").rename(pair / "step-00000050.replaced")
    assert newest(pair)[0].step == 50
    prepare(pair, 50)
    assert newest(pair)[0].path.name == "step-00000050"


# -- restoring ----------------------------------------------------------------------------------


def test_only_the_files_that_a_box_meets_are_read(pair):
    checkpoint = load(pair / "step-00000050")
    (checkpoint.path / "shard-00002.h5").unlink()
    out = np.empty((4, 7), "float32")
    restore(checkpoint, "fc1.weight", ((0, 4), (0, 7)), out)
    np.testing.assert_array_equal(out, values(2)["fc1.weight"][:4])
    with pytest.raises(CheckpointError, match=r"shard-00002.h5: cannot be opened: No such file"):
        restore(checkpoint, "fc1.weight", ((0, 5), (0, 7)), np.empty((5, 7), "float32"))


def test_a_link_out_of_the_folder_is_not_followed(pair):
    checkpoint = load(pair / "step-00000050")
    for file in checkpoint.files:
        (checkpoint.path / file.name).rename(pair / file.name)
        (checkpoint.path / file.name).symlink_to(pair / file.name)
    with pytest.raises(CheckpointError, match=r"shard-00000.h5: cannot be opened"):
        restore(checkpoint, "step", (), np.empty((), "int64"))


def test_an_empty_box_reads_nothing(pair):
    checkpoint = load(pair / "step-00000050")
    for file in checkpoint.files:
        (checkpoint.path / file.name).unlink()
    restore(checkpoint, "fc1.weight", ((2, 2), (0, 7)), np.empty((0, 7), "float32"))
    restore(checkpoint, "none", ((0, 0), (0, 4)), np.empty((0, 4), "int32"))


def test_a_slice_is_hashed_once_and_then_read_in_part(tmp_path, monkeypatch):
    array = np.arange(300.0).reshape(100, 3)
    checkpoint = load(save(tmp_path, 1, {"w": array}, (1,)))
    with CheckpointReader(checkpoint) as reader:
        sizes = []
        read_into = reader._files.read_into

        def counted(name, offset, out):
            sizes.append(len(out))
            read_into(name, offset, out)

        monkeypatch.setattr(reader._files, "read_into", counted)
        for rows in [(10, 13), (97, 100)]:
            out = np.empty((3, 3))
            reader.restore("w", (rows, (0, 3)), out)
            np.testing.assert_array_equal(out, array[slice(*rows)])
    assert sizes == [2400, 72]


def test_a_strided_target_is_filled(pair):
    out = np.zeros((7, 5), "float32").T
    restore(load(pair / "step-00000050"), "fc1.weight", ((0, 5), (0, 7)), out)
    np.testing.assert_array_equal(out, values(2)["fc1.weight"])


REQUESTS = {
    "name": ("fc9", ((0, 5), (0, 7)), (5, 7), "float32", "no such variable; it holds fc1.weight"),
    "dtype": ("fc1.weight", ((0, 5), (0, 7)), (5, 7), "float64", "float32, wanted as float64"),
    "dims": ("fc1.weight", ((0, 5),), (5,), "float32", r"shape \(5, 7\), \(\(0, 5\),\) lies"),
    "outside": ("fc1.weight", ((0, 6), (0, 7)), (6, 7), "float32", "lies outside"),
    "negative": ("fc1.weight", ((-1, 4), (0, 7)), (5, 7), "float32", "lies outside"),
    "out": ("fc1.weight", ((0, 5), (0, 7)), (7, 5), "float32", r"array of shape \(7, 5\)"),
}


@pytest.mark.parametrize(("name", "box", "shape", "dtype", "text"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_that_does_not_fit_is_refused(pair, name, box, shape, dtype, text):
    with pytest.raises(CheckpointError, match=text):
        restore(load(pair / "step-00000050"), name, box, np.empty(shape, dtype))


def test_variables_of_the_plan_must_be_in_the_checkpoint_as_they_are(pair):
    checkpoint = load(pair / "step-00000050")
    wanted = list(checkpoint.variables)
    assert require_variables(checkpoint, wanted) == []
    assert require_variables(checkpoint, wanted[1:]) == ["fc1.weight"]
    wanted[0] = SavedVariable("fc1.weight", (7, 5), "float32")
    wanted[1] = SavedVariable("fc1.bias", (3,), "float32")
    with pytest.raises(CheckpointError) as caught:
        require_variables(checkpoint, [*wanted, SavedVariable("new", (), "int64")])
    message = str(caught.value)
    assert "fc1.weight: float32 (5, 7) in the checkpoint, float32 (7, 5) in the plan" in message
    assert "fc1.bias: float64 (3,) in the checkpoint, float32 (3,) in the plan" in message
    assert "new: not in the checkpoint" in message


# -- another program ----------------------------------------------------------------------------


def test_the_same_program_has_no_differences(pair):
    checkpoint = load(pair / "step-00000050")
    assert require_program(checkpoint, IDENTITY, "b" * 64, accept_changes=False) == []


def test_another_program_lists_each_section_with_both_values(pair):
    checkpoint = load(pair / "step-00000050")
    plan = (("model", "dense 5\ndense 4"), ("optimizer", "sgd lr=0.2"), ("seed", "1"))
    lines = [
        "model, line 2: 'dense 3' in the checkpoint, 'dense 4' in the plan",
        "optimizer: 'sgd lr=0.1' in the checkpoint, 'sgd lr=0.2' in the plan",
        "seed: only in the plan",
    ]
    with pytest.raises(CheckpointError, match="--accept-changes") as caught:
        require_program(checkpoint, plan, "c" * 64, accept_changes=False)
    for line in [*lines, "b" * 64, "c" * 64]:
        assert line in str(caught.value)
    assert require_program(checkpoint, plan, "c" * 64, accept_changes=True) == lines


def test_long_values_are_shown_where_they_differ(pair):
    checkpoint = load(pair / "step-00000050")
    plan = (("model", "dense 5\ndense 3"), ("optimizer", "sgd lr=0.1" + "0" * 500 + "5"))
    (line,) = require_program(checkpoint, plan, "c" * 64, accept_changes=True)
    assert "0'..." in line
    assert len(line) < 300


# -- telling ------------------------------------------------------------------------------------


def test_info_describes_a_run_its_folder_and_one_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, 40, values(1), (2,))
    save(folder, 50, values(2), (3,), epoch=4)
    prepare(folder, 60)
    found = info(tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert found == info(folder)
    assert [(c["complete"], c.get("step")) for c in found["checkpoints"]] == [
        (False, None), (True, 50), (True, 40),
    ]  # fmt: skip
    assert "partial" in found["checkpoints"][0]["faults"][0]
    one = info(folder / "step-00000050")["checkpoints"][0]
    assert one == found["checkpoints"][1]
    assert (one["epoch"], one["ranks"], one["state"]) == (4, 3, {"row": 17, "best": None})
    assert one["bytes"] == sum(p.stat().st_size for p in (folder / "step-00000050").glob("*.h5"))
    assert one["variables"][0] == {
        "name": "fc1.weight", "shape": [5, 7], "dtype": "float32", "slices": 3, "bytes": 140,
    }  # fmt: skip


def test_the_text_says_what_is_complete_and_why_the_rest_is_not(pair):
    truncate(pair / "step-00000050" / "shard-00000.h5", 10)
    text = describe(pair)
    assert "step-00000050: not complete" in text
    assert "has 10 bytes" in text
    assert "step-00000040: complete" in text
    assert "a" * 64 in text
    lines = [line.split() for line in text.splitlines()]
    assert ["fc1.bias", "float64", "(3,)", "2", "24"] in lines
    assert ["step", "int64", "()", "1", "8"] in lines


def test_deep_info_reads_every_byte(pair):
    flip(pair / "step-00000050" / "shard-00000.h5", 3)
    assert [c["complete"] for c in info(pair)["checkpoints"]] == [True, True]
    deep = info(pair, deep=True)["checkpoints"]
    assert [c["complete"] for c in deep] == [False, True]
    assert "damaged outside of the slices" in deep[0]["faults"][0]


def test_info_of_nothing(tmp_path):
    assert describe(tmp_path) == f"{tmp_path}: no checkpoints\n"
    with pytest.raises(CheckpointError, match="no such folder"):
        info(tmp_path / "absent")
