"""Weights in safetensors and .npz: read by slices, written one at a time, refused when damaged."""

import json
import tomllib
from itertools import product

import numpy as np
import pytest

from mpiflow.errors import CheckpointError, UsageError
from mpiflow.io.weights import npz, safetensors
from mpiflow.io.weights.builtin import name_map
from mpiflow.io.weights.first import fill, is_of_model, resolve
from mpiflow.io.weights.names import NameMap, Rule, read_map
from mpiflow.io.weights.pattern import parse_pattern
from mpiflow.io.weights.source import open_tensors
from mpiflow.io.weights.tensors import TensorInfo, read_box, widened
from mpiflow.plan.first import Filled


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def infos_of(arrays):
    return [TensorInfo(name, a.shape, a.dtype.name) for name, a in arrays.items()]


def write(path, arrays):
    if path.suffix == ".npz":
        npz.write(path, infos_of(arrays), iter(arrays.values()))
    else:
        safetensors.write(path, infos_of(arrays), iter(arrays.values()), {"format": "pt"})
    return path


ARRAYS = {
    "a.weight": draw(5, 3),
    "count": np.array(7, np.int64),
    "half": draw(2, 3, 4, dtype=np.float16),
    "flags": np.array([True, False]),
}


def whole(array):
    return tuple((0, n) for n in array.shape)


def boxes(shape):
    return product(*([(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape))


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_what_is_written_is_read_by_any_box(tmp_path, suffix):
    path = write(tmp_path / f"w{suffix}", ARRAYS)
    with open_tensors(path) as found:
        assert list(found.tensors.values()) == infos_of(ARRAYS)
        for name, array in ARRAYS.items():
            for box in boxes(array.shape):
                part = found.read(name, box)
                assert part.dtype == array.dtype
                np.testing.assert_array_equal(part, array[tuple(slice(*s) for s in box)])


def test_numpy_reads_and_writes_the_same_npz(tmp_path):
    ours = np.load(write(tmp_path / "ours.npz", ARRAYS))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(ours[name], array)
    columns = {"f": np.asfortranarray(draw(4, 3)), "big": draw(3, 2).astype(">f4")}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "theirs.npz", **columns)
        with open_tensors(tmp_path / "theirs.npz") as found:
            for name, array in columns.items():
                box = ((1, 3), (0, 2))
                np.testing.assert_array_equal(found.read(name, box), array[1:3, :2])


def test_the_header_is_as_the_format_says(tmp_path):
    data = write(tmp_path / "w.safetensors", {"x": np.array([1, 2], np.float32)}).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = {
        "__metadata__": {"format": "pt"},
        "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    assert json.loads(data[8 : 8 + length]) == header
    assert length % 8 == 0
    assert data[8 + length :] == np.array([1, 2], "<f4").tobytes()


def test_bfloat16_is_read_as_float32(tmp_path):
    numbers = np.array([1.5, -3.0, 2.0**-130, np.inf], np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype("<u2")
    header = b'{"x":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}'
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bits.tobytes())
    with open_tensors(path) as found:
        read = found.read("x", ((0, 4),))
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, widened(bits))
    assert (read[0], read[1], read[3]) == (1.5, -3.0, np.inf)


def test_only_the_bytes_of_a_slice_are_read():
    array = draw(8, 3, 8192)
    data, read = array.tobytes(), []

    def read_into(at, out):
        read.append(len(out))
        out[:] = data[at : at + len(out)]

    box = ((2, 4), (1, 3), (0, 4096))
    part = read_box(read_into, array.shape, np.float32, box)
    np.testing.assert_array_equal(part, array[2:4, 1:3, :4096])
    assert read == [4096 * 4] * 4  # as long as 16 KiB, so that the rest may be left out


def test_files_of_several_parts_are_one(tmp_path):
    write(tmp_path / "one.safetensors", {"a": draw(2)})
    write(tmp_path / "two.safetensors", {"b": draw(3)})
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_tensors(tmp_path) as found:
        assert set(found.tensors) == {"a", "b"}
        np.testing.assert_array_equal(found.read("b", ((1, 3),)), draw(3)[1:])
    index["weight_map"]["b"] = "../two.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is no file beside it"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "no mapping"),
        (b'{"x":', "damaged"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "as long as its shape"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "must begin at"),
        (b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "its header tells of"),
        (b'{"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "a tensor has"),
        (b'{"x":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}}', "a tensor has"),
        (b'{"x":1,"x":1}', "stands there twice"),
        (b'{"x":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,8]}}', "lies at"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header, message):
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        open_tensors(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 40)
    (tmp_path / "w.npz").write_bytes(b"PK")
    (tmp_path / "w.bin").write_bytes(b"")
    np.savez(tmp_path / "objects.npz", x=np.array(["a"]))
    for name, message in (
        ("w.safetensors", "not a safetensors file"), ("w.npz", "cannot be read as .npz"),
        ("w.bin", "weights are read from"), ("objects.npz", "not plain numbers"),
        ("none.npz", "no such file"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            open_tensors(tmp_path / name)


def test_a_failed_write_leaves_no_file(tmp_path):
    def arrays():
        yield draw(2)
        raise OSError(28, "No space left on device")

    infos = [TensorInfo("a", (2,), "float32"), TensorInfo("b", (2,), "float32")]
    with pytest.raises(OSError, match="No space"):
        safetensors.write(tmp_path / "w.safetensors", infos, arrays(), {})
    with pytest.raises(OSError, match="No space"):
        npz.write(tmp_path / "w.npz", infos, arrays())
    assert list(tmp_path.iterdir()) == []


# -- patterns -----------------------------------------------------------------------------------

QKV = Filled("qkv", ("q", "k", "v"), "(k r d) i -> i (k r d)", "r", (2, 1, 1), (("k", 3),))
FUSED = Filled("fused", ("c",), "i (r h d) -> i (h r d)", "", (), (("r", 3), ("h", 2)))
CASES = [
    (Filled("turned", ("w",), "o i -> i o"), {"w": draw(5, 3)}, lambda w: w.T),
    (Filled("conv", ("w",), "h w i o -> o i h w"), {"w": draw(2, 3, 4, 5)},
     lambda w: w.transpose(3, 2, 0, 1)),
    (QKV, {"q": draw(24, 5), "k": draw(12, 5), "v": draw(12, 5, dtype=np.float64)},
     lambda q, k, v: np.concatenate([x.reshape(3, -1, 4, 5) for x in (q, k, v)], 1)
     .reshape(48, 5).T),
    (FUSED, {"c": draw(4, 12)},
     lambda c: c.reshape(4, 3, 2, 2).transpose(0, 2, 1, 3).reshape(4, 12)),
]  # fmt: skip


@pytest.mark.parametrize(("filled", "tensors", "formula"), CASES, ids=lambda x: str(x)[:24])
def test_a_pattern_gives_every_part_of_a_variable(tmp_path, filled, tensors, formula):
    expected = formula(*tensors.values()).astype(np.float32)
    step = 7 if expected.size > 200 else 1
    with open_tensors(write(tmp_path / "w.safetensors", tensors)) as source:
        for box in list(boxes(expected.shape))[::step]:
            part = expected[tuple(slice(*s) for s in box)]
            out = np.full_like(part, np.nan)
            fill(source, filled, box, out)
            np.testing.assert_array_equal(out, part)


@pytest.mark.parametrize(("filled", "tensors", "formula"), CASES, ids=lambda x: str(x)[:24])
def test_a_pattern_has_a_way_back(filled, tensors, formula):
    variable, pattern = formula(*tensors.values()), parse_pattern(filled.pattern)
    sizes = dict(filled.sizes)
    each = pattern.reversed_sizes(variable.shape, sizes, filled.join, filled.parts)
    parts = pattern.parted(variable, each, filled.join)
    for part, tensor in zip(parts, tensors.values(), strict=True):
        np.testing.assert_array_equal(part, tensor)


@pytest.mark.parametrize("text", ["o i", "o i -> i", "oo i -> i oo", "o o -> o o", "(o i -> i o"])
def test_a_pattern_that_means_nothing_is_refused(text):
    with pytest.raises(CheckpointError, match="pattern"):
        parse_pattern(text)


# -- names --------------------------------------------------------------------------------------

TOML = """
ignore = ["*.seen"]
prefixes = ["model.", ""]
[names]
"head.*" = "classifier.*"
"block*.norm.scale" = ["h.*.ln.weight", "h.*.ln.gamma"]
"block*.w" = {from = "h.*.w", as = "o i -> i o"}
"block*.qkv" = {from = ["h.*.q", "h.*.k"], as = "(r h d) -> (h r d)", join = "r", sizes = {h = 2}}
"""


def test_a_map_is_read_from_toml_and_json(tmp_path):
    (tmp_path / "m.toml").write_text(TOML)
    (tmp_path / "m.json").write_text(json.dumps(tomllib.loads(TOML)))
    one, two = read_map(tmp_path / "m.toml"), name_map("m.json", tmp_path)
    assert one.rules == two.rules
    assert one.candidates("block3.qkv")[0] == Filled(
        "block3.qkv", ("model.h.3.q", "model.h.3.k"), "(r h d) -> (h r d)", "r", (1, 1), (("h", 2),)
    )
    scales = [c.tensors[0] for c in one.candidates("block1.norm.scale")]
    assert scales == ["model.h.1.ln.weight", "model.h.1.ln.gamma", "h.1.ln.weight", "h.1.ln.gamma"]
    assert one.candidates("head.a.b")[0].tensors == ("model.classifier.a.b",)
    assert one.candidates("else") == []
    assert one.ignores("model.x.seen")
    assert not one.ignores("seen")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"a*" = "b"', "as many"),
        ('"a" = 3', "write a name"),
        ('"a" = {from = ["b", "c"]}', "joined along a letter"),
        ('"a" = {from = ["b", "c"], as = "x -> x", join = "r"}', "a letter of the pattern"),
        ('"a" = {from = "b", as = "x y"}', "an arrow"),
        ('"a" = {from = "b", as = "x -> x", sizes = {x = -1}}', "whole numbers"),
        ('"a" = {to = "b"}', "write a name"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(tmp_path, line, message):
    (tmp_path / "m.toml").write_text(f"[names]\n{line}\n")
    with pytest.raises(CheckpointError, match=message):
        read_map(tmp_path / "m.toml")


def test_built_in_maps_ask_for_what_no_file_tells():
    assert name_map("torchvision-resnet").name == "torchvision-resnet"
    with pytest.raises(UsageError, match="write hf-gpt2:heads=12"):
        name_map("hf-gpt2")
    with pytest.raises(UsageError, match="write hf-llama:heads=12,kv_heads=12"):
        name_map("hf-llama:heads=4")
    with pytest.raises(UsageError, match="one of torchvision-resnet"):
        name_map("vgg")
    with pytest.raises(UsageError, match="settings are numbers"):
        name_map("hf-bert:heads=many")


def test_what_stands_beside_a_weight_is_not_of_the_model():
    names = ("w", "w.momentum", "norm.squares", "step", "average")
    assert [name for name in names if is_of_model(name, names)] == ["w", "norm.squares", "average"]


# -- what fills what ----------------------------------------------------------------------------


def test_all_problems_are_told_at_once(tmp_path):
    held = {"a": draw(2), "b": draw(3, 2), "d": draw(1), "e": np.array([1])}
    variables = [
        TensorInfo("a", (2,), "float32"), TensorInfo("b", (2, 3), "float32"),
        TensorInfo("c", (4,), "float32"), TensorInfo("e", (1,), "float32"),
    ]  # fmt: skip
    same = NameMap("mine", (Rule("*", ("*",)),))
    with open_tensors(write(tmp_path / "w.npz", held)) as source:
        with pytest.raises(CheckpointError) as caught:
            resolve(source, same, variables)
        lines = str(caught.value).splitlines()
        assert lines[0] == f"{source.path} does not fit the job by the names 'mine':"
        assert "    c: float32 (4,), from c" in lines
        assert "    b: float32 (2, 3) in the job, float32 (3, 2) in b" in lines
        assert "    e: float32 (1,) in the job, int64 (1,) in e: another kind of number" in lines
        assert "    d: float32 (1,)" in lines
        filled, remarks = resolve(source, same, variables, without=["b", "c", "e"], ignore=["d"])
        assert [f.variable for f in filled] == ["a"]
        assert remarks == []
        with pytest.raises(
            CheckpointError, match=r"without 'x\*' fits no variable; there are a, b"
        ):
            resolve(source, same, variables, without=["x*"])


def test_losing_digits_is_said(tmp_path):
    with open_tensors(write(tmp_path / "w.npz", {"a": draw(2, dtype=np.float64)})) as source:
        _, remarks = resolve(
            source, NameMap("", (Rule("*", ("*",)),)), [TensorInfo("a", (2,), "float32")]
        )
    assert remarks == ["1 variables lose digits: a"]
