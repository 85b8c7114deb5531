"""Export: the variables of a model, by the names of a map, without what the optimizer keeps."""

import numpy as np
import pytest
from checkpoint_parts import save

from mpiflow.errors import CheckpointError, UsageError
from mpiflow.io.weights.export import export
from mpiflow.io.weights.names import SAME, NameMap, Rule
from mpiflow.io.weights.source import find_checkpoint, open_tensors

ARRAYS = {
    "fc.weight": np.arange(15, dtype=np.float32).reshape(5, 3),
    "fc.weight.momentum": np.ones((5, 3), np.float32),
    "fc.weight.average": np.full((5, 3), 2, np.float32),
    "norm.running_mean": np.arange(3, dtype=np.float64),
    "step": np.array(4, np.int64),
}


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "run" / "checkpoints", 4, ARRAYS, (2,))
    return find_checkpoint(tmp_path / "run")


def read(path):
    with open_tensors(path) as found:
        return {
            name: found.read(name, tuple((0, n) for n in info.shape))
            for name, info in found.tensors.items()
        }


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_the_model_is_written_and_the_rest_is_named(checkpoint, tmp_path, suffix):
    done = export(checkpoint, tmp_path / "deep" / f"w{suffix}", SAME)
    found = read(tmp_path / "deep" / f"w{suffix}")
    assert sorted(found) == ["fc.weight", "norm.running_mean"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
    assert (done.tensors, done.nbytes) == (2, 15 * 4 + 3 * 8)
    assert done.left_out == ("fc.weight.momentum", "fc.weight.average", "step")


def test_averages_and_everything(checkpoint, tmp_path):
    done = export(checkpoint, tmp_path / "a.npz", SAME, average=True)
    assert (read(tmp_path / "a.npz")["fc.weight"] == 2).all()
    assert done.left_out == ("fc.weight.momentum", "step")
    export(checkpoint, tmp_path / "all.npz", SAME, everything=True)
    assert {name: a.shape for name, a in read(tmp_path / "all.npz").items()} == {
        name: a.shape for name, a in ARRAYS.items()
    }


def test_averages_that_are_not_there_are_not_exported(tmp_path):
    arrays = {name: array for name, array in ARRAYS.items() if "average" not in name}
    save(tmp_path / "run" / "checkpoints", 4, arrays, (2,))
    other = find_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds no averages; optimizers keep them with ema="):
        export(other, tmp_path / "a.npz", SAME, average=True)
    assert not (tmp_path / "a.npz").exists()


def test_larger_elements_come_first_so_that_all_are_aligned(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "w.safetensors", SAME)
    assert list(read(tmp_path / "w.safetensors")) == ["norm.running_mean", "fc.weight"]


def test_names_must_be_for_everything_and_apart(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"mine has no name for norm\.running_mean: float64"):
        export(checkpoint, tmp_path / "w.npz", NameMap("mine", (Rule("fc.*", ("x.*",)),)))
    same = NameMap("mine", (Rule("fc.weight", ("x",)), Rule("norm.running_mean", ("x",))))
    with pytest.raises(CheckpointError, match="two variables would be written as x"):
        export(checkpoint, tmp_path / "w.npz", same)
    flat = NameMap("mine", (Rule("*", ("*",), "a b c -> c b a"),))
    with pytest.raises(CheckpointError, match="has not 3 dims"):
        export(checkpoint, tmp_path / "w.npz", flat)
    with pytest.raises(UsageError, match=r"w\.bin: weights are written to"):
        export(checkpoint, tmp_path / "w.bin", SAME)
    assert not list(tmp_path.glob("*.npz"))


def test_damage_is_found_before_it_is_passed_on(checkpoint, tmp_path):
    shard = checkpoint.path / "shard-00000.h5"
    piece = next(p for p in checkpoint.slices if p.file == shard.name and p.nbytes)
    content = bytearray(shard.read_bytes())
    content[piece.offset] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        export(checkpoint, tmp_path / "w.safetensors", SAME)
    assert not (tmp_path / "w.safetensors").exists()


def test_a_run_without_a_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(tmp_path / "none")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)
