import zlib
from dataclasses import replace

import h5py
import numpy as np
import pytest

from mpiflow.errors import DataError
from mpiflow.graph.sbp import span
from mpiflow.io import reader as reader_module
from mpiflow.io import rows as rows_module
from mpiflow.io.dataset import cache_bytes, inspect, open_reader
from mpiflow.io.sampler import batch_rows, steps_per_block, steps_per_epoch

SIZES = (13, 5, 1, 0, 21)
ROWS = sum(SIZES)


@pytest.fixture(autouse=True)
def no_set_is_small(monkeypatch):
    monkeypatch.setattr(reader_module, "_SMALL_BYTES", 0)


def column(dtype="i8", rows=ROWS):
    return np.arange(rows).astype(dtype)


def image(dtype="f4"):
    return (np.arange(ROWS * 6).reshape(ROWS, 2, 3) * 0.5).astype(dtype)


LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": 4},
    "one row a chunk": {"chunks": 1},
    "chunks longer than the file": {"chunks": 64},
    "gzip": {"chunks": 4, "compression": "gzip"},
    "gzip and shuffle": {"chunks": 4, "compression": "gzip", "shuffle": True},
    "shuffle alone": {"chunks": 4, "shuffle": True},
    "lzf": {"chunks": 4, "compression": "lzf"},
    "checksums": {"chunks": 4, "fletcher32": True, "compression": "gzip"},
}
BY_LIBRARY = {"lzf", "checksums"}


def save(folder, arrays, chunks=None, **options):
    """Shards of SIZES rows over which the arrays are spread."""
    start = 0
    for index, rows in enumerate(SIZES):
        with h5py.File(folder / f"s{index}.h5", "w") as file:
            for name, array in arrays.items():
                part = array[start : start + rows]
                shape = None if chunks is None else (chunks, *part.shape[1:])
                limit = None if chunks is None else (None, *part.shape[1:])
                file.create_dataset(name, data=part, chunks=shape, maxshape=limit, **options)
        start += rows


def look(folder, **change):
    options = {"batch": 7, "shuffle": True, "seed": 3, "lanes": 2, "window": 2}
    return inspect("train", "s*.h5", folder, **(options | change))


def read(reader, step, rows=None):
    data = reader.dataset
    start, stop = rows or (0, data.batch)
    out = {f.name: np.empty((stop - start, *f.shape), f.dtype) for f in data.fields}
    reader.read(step, (start, stop), out)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_rows_of_the_sampler(tmp_path, layout):
    arrays = {"x": image(), "y": column()}
    save(tmp_path, arrays, **LAYOUTS[layout])
    data = look(tmp_path)
    reader = open_reader(data, tmp_path)
    for step in range(12):
        epoch, batch = divmod(step, 5)
        rows = batch_rows(data, epoch, batch, 0, 7)
        got = read(reader, step)
        assert np.array_equal(got["x"], arrays["x"][rows])
        assert np.array_equal(got["y"], rows)
    assert {key < 0 for key in reader._shards._open} == {layout in BY_LIBRARY}
    reader.close()


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "<i2", ">i2", ">f4", "<f2", ">f8", "u8", ">u4"])
@pytest.mark.parametrize("chunks", [None, 4])
def test_any_number_of_any_byte_order_arrives_native(tmp_path, dtype, chunks):
    save(tmp_path, {"x": image(dtype)}, chunks)
    data = look(tmp_path, shuffle=False)
    got = read(open_reader(data, tmp_path), 3)["x"]
    assert got.dtype == np.dtype(dtype).newbyteorder("=")
    assert np.array_equal(got, image(dtype)[21:28])


def test_fields_may_have_chunks_of_different_length(tmp_path):
    save(tmp_path, {"x": image()}, 3)
    start = 0
    for index, rows in enumerate(SIZES):
        with h5py.File(tmp_path / f"s{index}.h5", "a") as file:
            part = column()[start : start + rows]
            file.create_dataset("y", data=part, chunks=(5,), maxshape=(None,))
        start += rows
    data = look(tmp_path)
    assert {shard.chunk_rows for shard in data.shards} == {5}
    got = read(open_reader(data, tmp_path), 2)
    assert np.array_equal(got["x"], image()[got["y"]])


def test_rows_split_over_chunks_are_read_through_the_library(tmp_path):
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        file.create_dataset("x", data=image(), chunks=(4, 1, 3))
    data = look(tmp_path)
    rows = batch_rows(data, 0, 1, 0, 7)
    assert np.array_equal(read(open_reader(data, tmp_path), 1)["x"], image()[rows])


@pytest.mark.parametrize("kind", ["virtual", "external", "compact", "user block"])
def test_unusual_storage_is_read_through_the_library(tmp_path, kind):
    part = column()
    if kind == "virtual":
        with h5py.File(tmp_path / "part.h5", "w") as file:
            file["y"] = part
        layout = h5py.VirtualLayout((ROWS,), "i8")
        layout[:] = h5py.VirtualSource(tmp_path / "part.h5", "y", (ROWS,))
    with h5py.File(tmp_path / "s1.h5", "w", userblock_size=512 * (kind == "user block")) as file:
        if kind == "virtual":
            file.create_virtual_dataset("y", layout)
        elif kind == "external":
            file.create_dataset("y", data=part, external=str(tmp_path / "y.raw"))
        elif kind == "compact":
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple((ROWS,))
            h5py.h5d.create(file.id, b"y", h5py.h5t.NATIVE_INT64, space, properties)
            file["y"][:] = part
        else:
            file.create_dataset("y", data=part, chunks=(4,))
    data = look(tmp_path, shuffle=False)
    assert read(open_reader(data, tmp_path), 1)["y"].tolist() == list(range(7, 14))


def test_chunks_never_written_give_the_fill_value(tmp_path):
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        sparse = file.create_dataset("y", (20,), "i4", chunks=(4,), fillvalue=-1)
        sparse[4:8] = 5
        file.create_dataset("z", (20,), "i4", fillvalue=-2)
    data = look(tmp_path, shuffle=False, batch=10)
    got = read(open_reader(data, tmp_path), 0)
    assert got["y"].tolist() == [-1] * 4 + [5] * 4 + [-1] * 2
    assert got["z"].tolist() == [-2] * 10


def test_a_chunk_stored_without_its_filter_is_read(tmp_path):
    """HDF5 leaves out an optional filter that fails or does not pay, and says so in a mask."""
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        y = file.create_dataset("y", (12,), "<i4", chunks=(4,), compression="gzip", shuffle=True)
        plain = np.arange(4, dtype="<i4")
        shuffled = plain.view("u1").reshape(4, 4).T.tobytes()
        y.id.write_direct_chunk((0,), plain.tobytes(), 0b11)
        y.id.write_direct_chunk((4,), shuffled, 0b10)
        y.id.write_direct_chunk((8,), zlib.compress(shuffled), 0)
    data = look(tmp_path, shuffle=False, batch=12)
    assert read(open_reader(data, tmp_path), 0)["y"].tolist() == [0, 1, 2, 3] * 3


def test_evaluation_counts_every_row_once_a_pass(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    data = look(tmp_path, shuffle=False)
    reader = open_reader(data, tmp_path, tail=True)
    for _ in range(2):
        rows = [read(reader, step, (0, min(7, ROWS - 7 * step)))["y"] for step in range(6)]
        assert np.concatenate(rows).tolist() == list(range(ROWS))
    assert read(reader, 6)["y"][0] == 0


def test_without_the_tail_epochs_have_complete_batches_only(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    reader = open_reader(look(tmp_path, shuffle=False), tmp_path)
    assert read(reader, 5)["y"][0] == 0


def test_rows_that_a_batch_has_not_are_refused(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    reader = open_reader(look(tmp_path, shuffle=False), tmp_path, tail=True)
    with pytest.raises(DataError, match="rows 0 to 7 are asked of batch 5 of epoch 0, which has 5"):
        read(reader, 5)


def test_a_shuffled_set_has_no_tail(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    with pytest.raises(DataError, match="no tail"):
        open_reader(look(tmp_path), tmp_path, tail=True)


def test_an_array_of_another_dtype_is_refused(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    reader = open_reader(look(tmp_path), tmp_path)
    with pytest.raises(DataError, match="'y' is int64"):
        reader.read(0, (0, 7), {"y": np.empty(7, "i4")})


def test_an_empty_span_reads_nothing(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    reader = open_reader(look(tmp_path), tmp_path)
    assert len(read(reader, 0, (3, 3))["y"]) == 0
    assert reader.decoded_bytes == 0


def test_ranks_read_disjoint_rows_that_make_up_the_batch(tmp_path):
    save(tmp_path, {"y": column()}, 4, compression="gzip")
    data = look(tmp_path)
    readers = [open_reader(data, tmp_path, rows=span(7, 3, rank)) for rank in range(3)]
    for step in range(7):
        parts = [read(r, step, span(7, 3, rank))["y"] for rank, r in enumerate(readers)]
        assert np.array_equal(np.concatenate(parts), batch_rows(data, *divmod(step, 5), 0, 7))


def test_describe_names_file_and_row(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    data = look(tmp_path)
    reader = open_reader(data, tmp_path)
    row = int(read(reader, 6)["y"][2])
    name, local = ("s0.h5", row) if row < 13 else ("s1.h5", row - 13)
    if row >= 19:
        name, local = "s4.h5", row - 19
    elif row == 18:
        name, local = "s2.h5", 0
    assert reader.describe(6, 2) == f"{name} row {local}"


def large(folder, rows=4000, chunks=50, **options):
    x = np.arange(rows, dtype="f4")[:, None] + np.zeros(8, "f4")
    for index, part in enumerate(np.split(x, 4)):
        with h5py.File(folder / f"s{index}.h5", "w") as file:
            file.create_dataset("x", data=part, chunks=(chunks, 8), **options)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("batch", "window"), [(40, 5), (36, 3), (200, 1)])
def test_each_chunk_is_decoded_once_an_epoch_within_the_bound(tmp_path, batch, window, ranks):
    """At most twice where two lanes share one, which each of the four may do at its ends."""
    large(tmp_path, compression="gzip")
    data = look(tmp_path, batch=batch, lanes=4, window=window)
    ahead = 4 * steps_per_block(data) * batch / 4
    decoded = 0
    for rank in range(ranks):
        rows = span(batch, ranks, rank)
        reader = open_reader(data, tmp_path, rows=rows)
        for step in range(2 * steps_per_epoch(data)):
            read(reader, step, rows)
            assert reader.held_bytes <= cache_bytes(data, rows)
        decoded += reader.decoded_bytes // 32
    assert 2 * 79 * 50 <= decoded <= 2 * (80 + 4) * 50 + ahead + 4 * 50


def test_the_next_block_is_read_while_one_is_used(tmp_path):
    large(tmp_path)
    data = look(tmp_path, batch=40, lanes=4, window=5)
    assert steps_per_block(data) == 25
    reader = open_reader(data, tmp_path)
    decoded = []
    for step in range(50):
        read(reader, step)
        decoded.append(reader.decoded_bytes // 32)
    assert decoded[0] == 1000
    assert max(np.diff(decoded)) <= 3 * 50
    assert decoded[24] < 2000 == decoded[25] <= decoded[26]


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_reading_in_order_decodes_each_row_once(tmp_path, options):
    large(tmp_path, **options)
    data = look(tmp_path, batch=33, shuffle=False)
    reader = open_reader(data, tmp_path)
    for step in range(steps_per_epoch(data)):
        read(reader, step)
        assert reader.held_bytes <= (2 * 33 + 50) * 32
    rows = steps_per_epoch(data) * 33
    assert reader.decoded_bytes == (-(-rows // 50) * 50 if options else rows) * 32


@pytest.mark.parametrize(("small", "window"), [(0, 100), (4000 * 32, 2)])
def test_a_set_that_fits_is_read_once_for_all_epochs(tmp_path, monkeypatch, small, window):
    monkeypatch.setattr(reader_module, "_SMALL_BYTES", small)
    large(tmp_path)
    data = look(tmp_path, batch=40, lanes=1, window=window)
    reader = open_reader(data, tmp_path)
    for step in range(3 * steps_per_epoch(data)):
        read(reader, step)
    assert reader.decoded_bytes == 4000 * 32 == reader.held_bytes


def test_many_shards_need_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_OPEN_FILES", 3)
    for index in range(20):
        options = {"compression": "lzf"} if index % 2 else {}
        with h5py.File(tmp_path / f"s{index}.h5", "w") as file:
            file.create_dataset("y", data=np.full(8, index), chunks=(4,), **options)
    reader = open_reader(look(tmp_path, batch=8), tmp_path)
    for step in range(20):
        read(reader, step)
        assert len(reader._shards._open) <= 3
    reader.close()


@pytest.mark.parametrize("layout", ["contiguous", "chunked", "gzip"])
def test_a_file_cut_after_it_was_opened_names_field_and_chunk(tmp_path, layout):
    save(tmp_path, {"y": column()}, **LAYOUTS[layout])
    data = look(tmp_path, shuffle=False, batch=5)
    reader = open_reader(data, tmp_path)
    read(reader, 0)
    with open(tmp_path / "s0.h5", "r+b") as file:
        file.truncate(500)
    with pytest.raises(DataError, match=r"s0\.h5: field 'y', chunk \d .*could be read"):
        read(reader, 1)


def test_a_damaged_chunk_is_named(tmp_path):
    save(tmp_path, {"y": column()}, **LAYOUTS["gzip"])
    data = look(tmp_path, shuffle=False)
    with h5py.File(tmp_path / "s0.h5") as file:
        place = file["y"].id.get_chunk_info(1).byte_offset
    with open(tmp_path / "s0.h5", "r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 4)
    with pytest.raises(DataError, match=r"s0\.h5: field 'y', chunk 1 \(rows 4 to 7\).*decompress"):
        read(open_reader(data, tmp_path), 0)


def test_a_checksum_that_fails_is_named(tmp_path):
    save(tmp_path, {"y": column()}, 4, fletcher32=True)
    data = look(tmp_path, shuffle=False)
    with h5py.File(tmp_path / "s0.h5") as file:
        place = file["y"].id.get_chunk_info(0).byte_offset
    with open(tmp_path / "s0.h5", "r+b") as file:
        file.seek(place)
        file.write(b"\x13\x57")
    with pytest.raises(DataError, match=r"s0\.h5: field 'y', chunk 0 .*HDF5 cannot read it"):
        read(open_reader(data, tmp_path), 0)


def test_a_file_that_went_away_is_named(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    data = look(tmp_path, shuffle=False)
    (tmp_path / "s1.h5").unlink()
    reader = open_reader(data, tmp_path)
    read(reader, 0)
    with pytest.raises(DataError, match=r"s1\.h5: no such file"):
        read(reader, 1)


def test_a_file_of_another_length_is_refused(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    data = look(tmp_path, shuffle=False)
    shards = (replace(data.shards[0], rows=12), *data.shards[1:])
    reader = open_reader(replace(data, shards=shards), tmp_path)
    with pytest.raises(DataError, match="has 13 rows; the plan says 12"):
        read(reader, 0)


def turns(batch, micro_batches, ranks=1, rank=0):
    """The rows of each batch that a rank reads in so many micro-batches."""
    rows = batch // micro_batches
    part = span(rows, ranks, rank)
    return [(k * rows + part[0], k * rows + part[1]) for k in range(micro_batches)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_spans_in_turn_give_the_rows_of_the_batch(tmp_path, micro_batches, shuffle):
    save(tmp_path, {"y": column()}, 4, compression="gzip")
    data = look(tmp_path, batch=6, lanes=4, shuffle=shuffle)
    spans = [turns(6, micro_batches, 2, rank) for rank in range(2)]
    readers = [open_reader(data, tmp_path, spans=each) for each in spans]
    for step in range(2 * steps_per_epoch(data)):
        for mine in zip(*spans, strict=True):
            for reader, (start, stop) in zip(readers, mine, strict=True):
                wanted = batch_rows(data, *divmod(step, steps_per_epoch(data)), start, stop)
                assert np.array_equal(read(reader, step, (start, stop))["y"], wanted)


@pytest.mark.parametrize(("micro_batches", "ranks"), [(10, 1), (4, 3)])
def test_spans_of_the_same_lanes_are_read_together(tmp_path, micro_batches, ranks):
    """Each chunk once an epoch by each rank that has rows of its lane, and in bounded memory."""
    large(tmp_path, compression="gzip")
    data = look(tmp_path, batch=40, lanes=4, window=5)
    for rank in range(ranks):
        spans = turns(40, micro_batches, ranks, rank)
        bound = cache_bytes(data, *spans)
        assert bound <= cache_bytes(data, (0, 40))
        reader = open_reader(data, tmp_path, spans=spans)
        for step in range(2 * steps_per_epoch(data)):
            for rows in spans:
                read(reader, step, rows)
                assert reader.held_bytes <= bound
        ahead = 4 * steps_per_block(data) * 40 / 4
        assert reader.decoded_bytes // 32 <= 2 * (80 + 4) * 50 + ahead + 4 * 50


@pytest.mark.parametrize("micro_batches", [3, 11])
def test_spans_in_order_decode_each_row_once(tmp_path, micro_batches):
    large(tmp_path, compression="gzip")
    data = look(tmp_path, batch=33, shuffle=False)
    spans = turns(33, micro_batches)
    reader, bound = open_reader(data, tmp_path, spans=spans), cache_bytes(data, *spans)
    for step in range(steps_per_epoch(data)):
        for rows in spans:
            read(reader, step, rows)
            assert reader.held_bytes <= bound
    assert reader.decoded_bytes == -(-steps_per_epoch(data) * 33 // 50) * 50 * 32


def test_a_small_set_is_kept_once_for_all_spans(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "_SMALL_BYTES", 4000 * 32)
    large(tmp_path)
    data = look(tmp_path, batch=40, lanes=4, window=2)
    spans = turns(40, 8, 2, 1)
    reader = open_reader(data, tmp_path, spans=spans)
    for step in range(3 * steps_per_epoch(data)):
        for rows in spans:
            read(reader, step, rows)
    assert reader.held_bytes == 4000 * 32
    assert reader.decoded_bytes <= 4000 * 32


def test_other_spans_than_those_announced_are_read_all_the_same(tmp_path):
    save(tmp_path, {"y": column()}, 4)
    data = look(tmp_path, batch=6, lanes=3)
    reader = open_reader(data, tmp_path, spans=[(0, 2), (3, 5)])
    for rows in [(0, 6), (0, 2), (1, 4), (4, 4), (3, 5), (5, 6)]:
        assert np.array_equal(read(reader, 1, rows)["y"], batch_rows(data, 0, 1, *rows))
