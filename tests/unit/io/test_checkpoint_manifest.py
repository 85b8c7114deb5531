"""A manifest may hold anything: whatever is wrong with it is a CheckpointError."""

import json
import os
from contextlib import suppress

import numpy as np
import pytest
from checkpoint_parts import save

from mpiflow.errors import CheckpointError
from mpiflow.io.checkpoint import manifest
from mpiflow.io.checkpoint.manifest import load
from mpiflow.io.checkpoint.read import newest


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """Syncing takes most of the time and shows only when the power fails."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def path(tmp_path):
    return save(tmp_path, 40, {"w": np.arange(6.0).reshape(3, 2), "n": np.array(4)}, (2,))


def rewrite(path, change, *, sealed=True):
    """Change the manifest; sealed gives it the checksum that its author could give it."""
    text = (path / "manifest.json").read_text()
    data = json.loads(text)
    checksum = data.pop("checksum")
    changed = change(data)
    data = data if changed is None else changed
    if sealed and isinstance(data, dict):
        text = manifest._sealed(data)
    else:
        text = json.dumps(data | {"checksum": checksum} if isinstance(data, dict) else data)
    (path / "manifest.json").write_text(text)


def put(key, value):
    """Set a dotted key: `files.0.1`."""

    def change(data):
        *parents, last = [int(k) if k.isdecimal() else k for k in key.split(".")]
        for parent in parents:
            data = data[parent]
        data[last] = value

    return change


def drop(key):
    def change(data):
        *parents, last = [int(k) if k.isdecimal() else k for k in key.split(".")]
        for parent in parents:
            data = data[parent]
        del data[last]

    return change


def test_rewriting_without_a_change_still_loads(path):
    before = load(path)
    rewrite(path, lambda data: None)
    assert load(path) == before


KEYS = ["format", "job", "step", "epoch", "ranks", "digest", "program", "identity", "state"]
KEYS += ["variables", "files"]
# Name, bytes, frame; name, dtype, shape, slices; file, dataset, offset, start, shape, checksum.
PLACES = [f"files.0.{i}" for i in range(3)] + [f"variables.0.{i}" for i in range(4)]
PLACES += [f"variables.0.3.0.{i}" for i in range(6)]
JUNK = [None, True, -1, 0.5, 2**200, float("inf"), "", "\ud800", "a\x1b[2J", [], [[]], {}, [-1]]
JUNK += [[True], [2**63], "../../etc/passwd", "/etc/passwd", "shard-00000.h5/../x", [None] * 99]
# What these keys may hold: any printable text, any size, any mapping, no variables at all.
HARMLESS = {
    ("job", str), ("digest", str), ("program", str), ("epoch", int), ("ranks", int),
    ("state", dict), ("identity", list), ("variables", list), ("variables.0.0", str),
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_an_error(path, key):
    rewrite(path, drop(key))
    with pytest.raises(CheckpointError, match=rf"manifest.json: .*'{key.split('.')[-1]}'"):
        load(path)


@pytest.mark.parametrize("key", PLACES)
def test_a_missing_item_is_an_error(path, key):
    rewrite(path, drop(key))
    with pytest.raises(CheckpointError, match=r"manifest.json: .* is not \["):
        load(path)


@pytest.mark.parametrize("key", KEYS + PLACES)
def test_junk_in_any_key_is_an_error_and_no_traceback(path, key):
    text = (path / "manifest.json").read_text()
    for junk in JUNK:
        rewrite(path, put(key, junk))
        if (key, type(junk)) in HARMLESS:
            with suppress(CheckpointError):
                load(path)
        else:
            with pytest.raises(CheckpointError) as caught:
                load(path)
            str(caught.value).encode()
            assert str(caught.value).isprintable()
        (path / "manifest.json").write_text(text)


FIRST = "variables.0.3.0"
HOSTILE = {
    "offset before the file": (put(f"{FIRST}.2", -8), r"slice \[0, 0, -8, .* is not"),
    "offset beyond the file": (put(f"{FIRST}.2", 10**6), "where the file ends"),
    "slice over another": (
        lambda d: put(f"{FIRST}.2", d["variables"][1][3][0][2])(d),
        "where the one before it ends",
    ),
    "huge shape": (put(f"{FIRST}.4", [2**40, 2**40]), "where the file ends"),
    "zero shape": (put(f"{FIRST}.4", [0, 2]), "it must lie between"),
    "shape of other dims": (put(f"{FIRST}.4", [4]), "slice .* is not"),
    "start beyond": (put(f"{FIRST}.3", [1, 0]), "gap from 0 to 1 of dim 0"),
    "slice left out": (drop(FIRST), "gap"),
    "scalar left out": (drop("variables.1.3.0"), "0 slices hold the same part"),
    "scalar twice": (
        lambda d: d["variables"][1][3].append([1, 9, 0, [], [], "0" * 64]),
        "2 slices hold the same part",
    ),
    "slice twice": (
        lambda d: d["variables"][0][3].append(d["variables"][0][3][0]),
        "where the one before it ends",
    ),
    "variable twice": (
        lambda d: d["variables"].append([*d["variables"][0][:3], []]),
        "a variable is listed twice",
    ),
    "file twice": (lambda d: d["files"].append(d["files"][0]), "a file is listed twice"),
    "file in another folder": (put("files.0.0", "../shard-00000.h5"), "file .* is not"),
    "file of another name": (put("files.0.0", "manifest.json"), "file .* is not"),
    "dataset path": (put(f"{FIRST}.1", "/x"), "slice .* is not"),
    "file that is not listed": (put(f"{FIRST}.0", 7), "is not .* with a file below 2"),
    "unknown dtype": (put("variables.0.1", "object"), 'unknown dtype "object"'),
    "larger variable": (put("variables.0.2", [2**61, 2]), "gap"),
    "other step": (put("step", 41), "holds step 41, its folder step 40"),
    "other format": (put("format", 2), "format 2, this mpiflow reads format 1"),
    "no mapping": (lambda d: [d], "a mapping is expected"),
    "slice that is none": (put(FIRST, 3), "slice 3 of 'w' is not"),
    "identity of three": (put("identity.0", ["a", "b", "c"]), "not two strings"),
    "short file": (put("files.0.1", 10), "where the file ends"),
    "long file": (put("files.0.1", 10**9), r"bytes, 1000000000 expected"),
}


@pytest.mark.parametrize(("change", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused_with_the_reason(path, change, reason):
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=reason):
        load(path)
    found, skipped = newest(path.parent)
    assert found is None
    assert len(skipped) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"null", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}", b"\0" * 50],
    ids=["empty", "not utf-8", "null", "deep", "long number", "zeros"],
)
def test_text_that_is_no_manifest_is_refused(path, content):
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load(path)


def test_a_change_without_a_new_checksum_is_damage(path):
    rewrite(path, put("state", {"row": 18}), sealed=False)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        load(path)
