"""Saving on some ranks, loading on others; folders, room and errors of writing."""

import os
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from checkpoint_parts import (
    assert_equal,
    header,
    layout,
    load_ranks,
    save,
    values,
    write_ranks,
)

from mpiflow.errors import CheckpointError
from mpiflow.graph.mesh import Mesh
from mpiflow.io.checkpoint import write as saving
from mpiflow.io.checkpoint.manifest import load
from mpiflow.io.checkpoint.read import newest, restore, verify
from mpiflow.io.checkpoint.records import SavedVariable
from mpiflow.io.checkpoint.space import check_space, make_folder, required_bytes
from mpiflow.io.checkpoint.write import CheckpointWriter, commit, prepare, prune
from mpiflow.io.disk import Disk
from mpiflow.plan.records import Plan, Settings, Variable


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """Syncing takes most of the time and shows only when the power fails."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


MESHES = [((1,), (0,)), ((2,), (0,)), ((3,), (1,)), ((4,), (0,)), ((8,), (0,)), ((2, 3), (0, 1))]
MESHES += [((3, 2), (1, 0)), ((2, 2), (0, 0))]


@pytest.mark.parametrize(("old", "old_dims"), MESHES)
def test_any_mesh_loads_what_any_mesh_saved(tmp_path, old, old_dims):
    arrays = values()
    path = save(tmp_path, 40, arrays, old, old_dims)
    for new, new_dims in MESHES:
        assert_equal(load_ranks(load(path), new, new_dims), arrays)


def test_a_saved_record_says_what_was_given(tmp_path):
    arrays = values()
    state = {"row": 3, "best": [0.5, 7], "patience": {"left": 2}}
    checkpoint = load(save(tmp_path, 40, arrays, (2, 3), state=state))
    expected = header(40, arrays, state=state)
    for name in expected.__slots__:
        assert getattr(checkpoint, name) == getattr(expected, name)
    assert checkpoint.ranks == 6
    assert names(tmp_path) == ["step-00000040"]
    assert names(checkpoint.path) == ["manifest.json", *(f.name for f in checkpoint.files)]


def test_ranks_without_elements_write_no_file(tmp_path):
    path = save(tmp_path, 1, {"w": np.arange(3.0)}, (5,))
    assert [f.name for f in load(path).files] == [f"shard-0000{r}.h5" for r in range(3)]


def test_a_shard_is_an_hdf5_file_that_explains_itself(tmp_path):
    arrays = {"fc1/weight": np.arange(10, dtype="float32").reshape(5, 2), "step": np.array(7)}
    path = save(tmp_path, 1, arrays, (2,))
    with h5py.File(path / "shard-00001.h5") as file:
        piece = file["slice-0"]
        assert piece.attrs["variable"] == "fc1/weight"
        assert piece.attrs["start"].tolist() == [3, 0]
        assert piece.dtype == np.dtype("<f4")
        np.testing.assert_array_equal(piece, arrays["fc1/weight"][3:])


def test_big_endian_and_strided_arrays_are_stored_by_value(tmp_path):
    whole = np.arange(24, dtype=">f4").reshape(4, 6)[::-1, ::2]
    path = save(tmp_path, 1, {"w": whole}, (1,))
    out = np.empty((4, 3), "float32")
    restore(load(path), "w", ((0, 4), (0, 3)), out)
    np.testing.assert_array_equal(out, whole)


def test_slices_larger_than_a_block_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("mpiflow.io.checkpoint.read._BLOCK", 100)
    arrays = {"w": np.arange(1400.0).reshape(70, 4, 5)}
    checkpoint = load(save(tmp_path, 1, arrays, (2,)))
    assert_equal(load_ranks(checkpoint, (3,), (2,)), arrays)
    assert_equal(load_ranks(checkpoint, (3,), (0,)), arrays)


def test_more_shards_than_open_files_are_allowed(tmp_path):
    arrays = {"w": np.arange(40.0), "v": np.arange(80, dtype="int8")}
    checkpoint = load(save(tmp_path, 1, arrays, (40,)))
    before = len(os.listdir("/proc/self/fd"))
    assert_equal(load_ranks(checkpoint, (3,)), arrays)
    assert verify(checkpoint) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_header_of_a_plan_holds_its_variables(tmp_path):
    variable = Variable("w", (5, 3), "float32", layout((5, 3), 1), offset=64, nbytes=60)
    plan = Plan(
        "digits", "1", "2", Mesh((("data", 2),)), "host", "", "fast", 0, (("model", "m"),),
        (variable,), (), 0, (), Settings(1, 10), (),
    )  # fmt: skip
    found = saving.header(plan, digest="d", program="p", step=3, epoch=0, state={})
    assert found.variables == (SavedVariable("w", (5, 3), "float32"),)
    assert (found.job, found.digest, found.program, found.step) == ("digits", "d", "p", 3)
    assert found.identity == plan.identity


# -- commit refuses what does not fit together --------------------------------------------------


def test_a_rank_that_did_not_write_is_a_gap(tmp_path):
    arrays = values()
    prepare(tmp_path, 40)
    write_ranks(tmp_path, 40, arrays, (3,), ranks=(0, 2))
    with pytest.raises(CheckpointError, match=r"'fc1.weight'.* gap from 2 to 4 of dim 0"):
        commit(tmp_path, header(40, arrays), 3, patience=0)
    assert newest(tmp_path)[0] is None


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap from 1 to 2 of dim 0"),
        ([((0, 0), (3, 2)), ((0, 1), (3, 2))], "overlap from 1 to 2 of dim 1"),
        ([((0, 0), (3, 3)), ((0, 0), (3, 3))], "2 slices hold the same part"),
        ([((0, 0), (3, 2))], "gap: 2 to 3 of dim 1"),
        ([((1, 0), (2, 3))], "gap from 0 to 1 of dim 0"),
        ([((0, 0), (4, 3))], "beyond the end: 3 to 4 of dim 0"),
        ([((0,), (3,))], "another number of dims"),
        ([], "gap: 0 to 3 of dim 0"),
    ],
)
def test_slices_must_cover_each_element_once(tmp_path, pieces, message):
    prepare(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, 1, 0, "host")
    for start, shape in pieces:
        writer.write("w", start, np.ones(shape, "float32"))
    writer.finish()
    with pytest.raises(CheckpointError, match=message):
        commit(tmp_path, header(1, {"w": np.ones((3, 3), "float32")}), 1, patience=0)


def test_a_slice_of_another_dtype_is_refused(tmp_path):
    prepare(tmp_path, 1)
    write_ranks(tmp_path, 1, {"w": np.ones(3, "float64")}, (1,))
    with pytest.raises(CheckpointError, match="dtype float64, the variable has float32"):
        commit(tmp_path, header(1, {"w": np.ones(3, "float32")}), 1, patience=0)


def test_a_slice_of_an_unknown_variable_is_refused(tmp_path):
    prepare(tmp_path, 1)
    write_ranks(tmp_path, 1, {"v": np.ones(3)}, (1,))
    with pytest.raises(CheckpointError, match="'v': no such variable"):
        commit(tmp_path, header(1, {"w": np.ones(3)}), 1, patience=0)


def test_state_that_is_not_json_is_refused_before_the_name(tmp_path):
    with pytest.raises(CheckpointError, match="not plain JSON"):
        save(tmp_path, 1, values(), state={"best": np.float32(1)})
    assert newest(tmp_path)[0] is None


# -- folders ------------------------------------------------------------------------------------


def test_prepare_clears_what_a_killed_run_left_of_the_step(tmp_path):
    prepare(tmp_path, 40)
    write_ranks(tmp_path, 40, values(5), (4,))
    path = save(tmp_path, 40, values(6), (2,))
    assert_equal(load_ranks(load(path), (3,)), values(6))
    assert len(load(path).files) == 2


def test_a_step_saved_again_replaces_the_first(tmp_path):
    save(tmp_path, 40, values(1), (3,))
    path = save(tmp_path, 40, values(2), (2,))
    assert names(tmp_path) == ["step-00000040"]
    assert_equal(load_ranks(load(path), (1,)), values(2))


class Killed(BaseException):
    """The process ends here."""


def file_operations(monkeypatch, fatal):
    """Count the operations that change folders and raise Killed instead of number `fatal`."""
    count = 0

    def counted(real):
        def operation(*arguments, **options):
            nonlocal count
            count += 1
            if count == fatal:
                raise Killed
            return real(*arguments, **options)

        return operation

    for module, name in [(os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir")]:
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_a_kill_at_any_operation_leaves_one_whole_checkpoint(tmp_path, monkeypatch, again):
    old, new = ({"w": np.arange(3.0) + i, "step": np.array(i)} for i in (1, 2))
    step = 40 if again else 50
    outcomes = []
    for fatal in range(1, 60):
        folder = tmp_path / str(fatal)
        save(folder, 30, old, (1,))
        save(folder, 40, old, (2,))
        with monkeypatch.context() as patch:
            file_operations(patch, fatal)
            try:
                save(folder, step, new, (2,))
                prune(folder, 2)
                finished = True
            except Killed:
                finished = False
        found, _ = newest(folder, deep=True)
        loaded = load_ranks(found, (3,))
        kind = "new" if np.array_equal(loaded["step"], new["step"]) else "old"
        assert_equal(loaded, new if kind == "new" else old)
        outcomes.append(kind)
        assert_equal(load_ranks(load(save(folder, step, new, (3,))), (2,)), new)
        prune(folder, 2)
        assert names(folder) == [f"step-000000{s}" for s in ((30, 40) if again else (40, 50))]
        if finished:
            break
    assert finished
    assert outcomes == sorted(outcomes, reverse=True)
    assert {"old", "new"} == set(outcomes)


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, unsynced = set(), []
    rename, replace_file = os.rename, os.replace

    def sync(handle):
        synced.add(os.fstat(handle).st_ino)

    def renaming(real):
        def operation(source, target):
            if os.stat(source).st_ino not in synced:
                unsynced.append(source)
            real(source, target)

        return operation

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", renaming(rename))
    monkeypatch.setattr(os, "replace", renaming(replace_file))
    path = save(tmp_path, 40, values(), (2,))
    assert unsynced == []
    assert {path.stat().st_ino, tmp_path.stat().st_ino} <= synced
    assert {file.stat().st_ino for file in path.iterdir()} <= synced


def test_prune_keeps_the_newest_and_the_protected(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, values(), (1,))
    prepare(tmp_path, 45)
    prepare(tmp_path, 60)
    (tmp_path / "step-00000005.removed").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    removed = prune(tmp_path, 2, protect=(20,))
    assert sorted(removed) == [
        "step-00000005.removed", "step-00000010", "step-00000030", "step-00000045.partial",
    ]  # fmt: skip
    assert names(tmp_path) == [
        "notes.txt", "step-00000020", "step-00000040", "step-00000050", "step-00000060.partial",
    ]  # fmt: skip


def test_prune_counts_only_complete_checkpoints(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, values(), (1,))
    (tmp_path / "step-00000030" / "shard-00000.h5").write_bytes(b"")
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_keep_zero_keeps_all(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, values(), (1,))
    assert prune(tmp_path, 0) == []


def test_a_folder_that_appears_late_is_waited_for(tmp_path, monkeypatch):
    real, calls = os.mkdir, []

    def mkdir(path, *rest):
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(17, "File exists", str(path))
        real(path, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    make_folder(tmp_path / "new")
    assert (tmp_path / "new").is_dir()
    assert len(calls) == 2


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints: checkpoints cannot be written here"):
        check_space(tmp_path / "checkpoints", 1)


# -- room ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 7, 20])
def test_required_bytes_is_an_upper_bound_and_not_a_loose_one(tmp_path, ranks):
    arrays = {f"block{i}.dense.weight": np.ones((50, 40), "float32") for i in range(8)}
    path = save(tmp_path, 1, arrays, (ranks,))
    used = sum(file.stat().st_size for file in path.iterdir())
    needed = required_bytes(load(path).variables, ranks)
    values_and_headers = 8 * 8000 + ranks * 8 * 1536 + ranks * 8192
    assert used <= needed == values_and_headers


def test_too_little_room_is_refused_with_both_numbers(tmp_path):
    check_space(tmp_path / "run" / "checkpoints", 1000)
    with pytest.raises(CheckpointError, match=rf"needs {2**62} bytes, \d+ are free"):
        check_space(tmp_path, 2**62)


def test_a_file_size_limit_is_reported_and_harms_nothing(tmp_path):
    save(tmp_path, 40, values(), (2,))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    prepare(tmp_path, 50)
    writer = CheckpointWriter(tmp_path, 50, 1, "node7")
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            writer.write("w", (0,), np.ones(100_000))
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "rank 1 on node7" in str(caught.value)
    assert "errno 27" in str(caught.value)
    assert names(tmp_path / "step-00000050.partial") == []
    assert newest(tmp_path)[0].step == 40


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_an_error_with_numbers_and_the_older_one_stays(small_disk):
    arrays = {"w": np.arange(300_000.0)}
    save(small_disk, 40, arrays, (2,))
    with pytest.raises(CheckpointError, match=r"needs \d+ bytes, \d+ are free"):
        check_space(small_disk, required_bytes(header(1, arrays).variables, 2))
    with pytest.raises(CheckpointError) as caught:
        save(small_disk, 50, arrays, (2,))
    message = str(caught.value)
    assert "rank 1 on host" in message
    assert "No space left on device (errno 28); 1200000 bytes needed" in message
    found, skipped = newest(small_disk, deep=True)
    assert found.step == 40
    assert ["partial" in reason for reason in skipped] == [True]
    assert_equal(load_ranks(found, (3,)), arrays)


def test_a_disk_that_fills_up_at_any_block_never_leaves_a_torn_one(small_disk, capfd):
    arrays = {"w": np.arange(1500.0), "v": np.arange(7.0)}
    save(small_disk, 40, arrays, (1,))
    block, ballast = os.statvfs(small_disk).f_frsize, small_disk / "ballast"
    for blocks in range(20):
        ballast.write_bytes(bytes((os.statvfs(small_disk).f_bavail - blocks) * block))
        try:
            save(small_disk, 50, arrays, (2,))
            break
        except CheckpointError as problem:
            message = str(problem)
        assert "errno 28" in message
        assert newest(small_disk, deep=True)[0].step == 40
        ballast.unlink()
        prepare(small_disk, 50)
    assert blocks > 5
    assert newest(small_disk, deep=True)[0].step == 50
    assert capfd.readouterr().err == ""


def test_a_failed_write_is_kept_until_it_is_asked_for():
    disk = Disk(os.open("/dev/full", os.O_RDWR))
    assert disk.write(memoryview(b"lost")) == 4
    with pytest.raises(OSError, match="No space left"):
        disk.check()
    disk.close()


def test_an_abandoned_shard_leaves_nothing(tmp_path):
    prepare(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, 1, 0, "host")
    writer.write("w", (0,), np.ones(5))
    writer.abandon()
    assert names(tmp_path / "step-00000001.partial") == []


def test_commit_names_the_folder_that_lost_a_shard(tmp_path):
    arrays = values()
    prepare(tmp_path, 1)
    write_ranks(tmp_path, 1, arrays, (2,))
    (tmp_path / "step-00000001.partial" / "shard-00001.h5").unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001.h5: No such file.*bytes expected"):
        commit(tmp_path, replace(header(1, arrays), epoch=3), 2, patience=0)
