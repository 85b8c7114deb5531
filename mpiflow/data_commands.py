"""What each command of `mpiflow data` does. The docstring of a command is its help.

As in `commands`, each imports what it needs when it runs.
"""

from __future__ import annotations

import re
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiflow.errors import DataError, UsageError
from mpiflow.progress import Bar

if TYPE_CHECKING:
    from mpiflow.io.pack import Storage
    from mpiflow.io.pack.text import Encoded
    from mpiflow.io.pack.tokenizer import Tokenizer
    from mpiflow.io.pack.write import Beside


def data_info(options: Namespace) -> int:
    """Show what data files hold, and what is wrong with them; exit code 1 if anything is."""
    from dataclasses import asdict

    from mpiflow.io.info import info, info_text

    found = info(options.pattern, Path(options.data))
    if options.json:
        options.answer = asdict(found)
    else:
        print(info_text(found))
    return 1 if found.problems else 0


def pack_arrays(options: Namespace) -> None:
    """Pack arrays: those of an .npz file, or what a Python function gives.

    SOURCE is FILE.npz, or MODULE.py:FUNCTION, a function that returns arrays by field name, or
    yields such mappings piece by piece.
    """
    _pack(options, options.source)


def pack_images(options: Namespace) -> None:
    """Pack images, of which every class has a folder: FOLDER/cat/1.png, ...

    Fields: image (channels, height, width) uint8 and label. Classes are numbered in order of
    their names; classes.txt, beside the packed files, lists them, and numbers those that are
    packed there later.
    """
    from mpiflow.io.pack.images import ImageFolder
    from mpiflow.io.pack.names import Numbering

    size = _image_size(options.size)
    if options.fit and size is None:
        raise UsageError(f"--fit {options.fit} goes with --size")
    classes = Numbering(_beside(options, "classes.txt"))
    source = ImageFolder(
        Path(options.folder), classes=classes, size=size, fit=options.fit or "crop",
        channels=1 if options.gray else 3,
    )  # fmt: skip
    _pack(options, source, classes.files)
    if source.ignored:
        print(f"left out, as no images: {source.ignored[0]}{_more(len(source.ignored))}")
    print(f"{len(classes)} classes, named in {classes.file}")


def pack_idx(options: Namespace) -> None:
    """Pack IDX files, as of MNIST and Fashion-MNIST, plain or compressed by gzip.

    SOURCE is a folder with train-images-idx3-ubyte.gz and so on, whose test set (t10k) is packed
    too; or FIELD=FILE for each field. Images get a dim of channels: (1, height, width).
    """
    from functools import partial

    from mpiflow.io.pack.idx import find_idx, read_idx

    if all("=" in source for source in options.source):
        files = {name: Path(file) for name, _, file in (s.partition("=") for s in options.source)}
        _pack(options, partial(read_idx, files))
        return
    if len(options.source) > 1:
        raise UsageError("give one folder, or FIELD=FILE for each field")
    sets = find_idx(Path(options.source[0]))
    if options.test and "test" in sets:
        raise UsageError(f"--test {options.test}: {options.source[0]} has a set to test already")
    if options.test or len(sets) == 1:
        _pack(options, partial(read_idx, next(iter(sets.values()))))
        return
    _pack_sets(options, {name: partial(read_idx, files) for name, files in sets.items()})


def pack_csv(options: Namespace) -> None:
    """Pack tables in CSV, in which every cell is a number or the name of a class.

    A field has one column or several: --field x=height,width --field pixels=p0..p783:uint8:1x28x28
    --field label=species:category. Without --field every column is one. Types are int64 and
    float32 by the first row unless given. Categories are numbered as they appear, and listed in
    FIELD.txt beside the packed files, which numbers those that are packed there later.
    """
    from mpiflow.io.pack.columns import parse_field
    from mpiflow.io.pack.names import Numbering
    from mpiflow.io.pack.table import read_tables

    fields = [parse_field(text) for text in options.field]
    twice = {field.name for field in fields if [f.name for f in fields].count(field.name) > 1}
    if twice:
        raise UsageError(f"--field names {min(twice)!r} twice")
    if len(options.delimiter) != 1:
        raise UsageError(f"--delimiter {options.delimiter!r} is not one character")
    numberings: dict[str, Numbering] = {}

    def numbering(field: str) -> Numbering:
        return numberings.setdefault(field, Numbering(_beside(options, f"{field}.txt")))

    rows = read_tables(
        [Path(file) for file in options.file], fields, numbering,
        delimiter=options.delimiter, header=not options.no_header,
    )  # fmt: skip
    _pack(options, rows, lambda: dict(f for n in numberings.values() for f in n.files().items()))
    for field, names in numberings.items():
        print(f"{len(names)} names of field {field}, listed in {names.file}")


def pack_text(options: Namespace) -> None:
    """Pack text as rows of tokens of one length.

    The tokenizer is learned from the text (--vocabulary) or given (--tokenizer), and is kept as
    tokenizer.json beside the packed files. Field: tokens (length,). With --pairs, rows are those
    of BERT: tokens, segment, positions of the tokens to be found, label (which they are), next. The
    rows to test are the last of the text.
    """
    if bool(options.vocabulary) == bool(options.tokenizer):
        raise UsageError("give --vocabulary N to learn a tokenizer, or --tokenizer FILE.json")
    if options.kind and options.tokenizer:
        raise UsageError("--kind is that of a tokenizer to be learned; leave out --tokenizer")
    if options.length < 1:
        raise UsageError(f"--length {options.length}: rows have 1 token at least")
    kept = _beside(options, "tokenizer.json")
    own = options.tokenizer and kept.exists() and kept.samefile(options.tokenizer)
    if kept.exists() and not own and not options.overwrite:
        raise DataError(
            f"{kept}: would be overwritten; use it (--tokenizer {kept}), choose another folder,"
            " remove it or allow it (--overwrite)"
        )
    with Bar() as bar:
        encoded = cache(lambda: _encoded(options, bar))
        # The one that is given, in OUT, stays as it is.
        beside = (lambda: {}) if own else (lambda: {kept: encoded().tokenizer.text()})
        _pack_text_rows(options, encoded, beside, bar)
    _print_text(encoded(), kept)


def _pack_text_rows(options: Namespace, encoded: Any, beside: Beside, bar: Bar) -> None:
    """Pack the rows of the text, which is encoded once it is known that files can be written."""
    from functools import partial

    from mpiflow.io.pack import pack_sets
    from mpiflow.io.pack.text import text_sets

    @cache
    def sets() -> dict[str, Any]:
        return text_sets(
            encoded(), options.length, pairs=options.pairs, test=_test(options.test),
            seed=options.seed,
        )  # fmt: skip

    names = ("train", "test") if options.test else ("train",)
    pack_sets(
        {name: partial(lambda name: sets()[name], name) for name in names}, options.out,
        shuffle=options.shuffle, seed=options.seed, storage=_storage(options),
        overwrite=options.overwrite, beside=beside, progress=bar,
    )  # fmt: skip
    _print_sets(options, names)


def _encoded(options: Namespace, bar: Bar) -> Encoded:
    from mpiflow.io.pack.text import encode

    files = [Path(file) for file in options.file]
    return encode(
        files, _tokenizer(options, files, bar), _folder(options), documents=options.documents,
        mark_ends=not options.pairs, progress=bar,
    )  # fmt: skip


def _tokenizer(options: Namespace, files: list[Path], bar: Bar) -> Tokenizer:
    from mpiflow.io.pack.text import learn
    from mpiflow.io.pack.tokenizer import read_tokenizer

    if options.tokenizer:
        return read_tokenizer(Path(options.tokenizer))
    return learn(files, options.kind or "bpe", options.vocabulary, bar)


def _print_text(encoded: Encoded, kept: Path) -> None:
    print(f"{len(encoded.tokens):,} tokens of {encoded.tokenizer.vocabulary}, by {kept};"
          f" guessed by its frequency, each costs {encoded.nats():.3f} nats")  # fmt: skip


# -- what the commands have in common -------------------------------------------------------------


def _pack(options: Namespace, source: Any, beside: Beside | None = None) -> None:
    """Pack one source, divided as the options ask, and show what was written."""
    from mpiflow.io.pack import pack

    storage = _storage(options)
    with Bar() as bar:
        pack(
            source, options.out, test=_test(options.test), shuffle=options.shuffle,
            seed=options.seed, shards=storage.shards, shard_rows=storage.shard_rows,
            chunk_rows=storage.chunk_rows, compression=storage.compression,
            overwrite=options.overwrite, beside=beside, progress=bar,
        )  # fmt: skip
    _print_sets(options, ("train", "test") if options.test else ("train",))


def _pack_sets(options: Namespace, sets: dict[str, Any]) -> None:
    """Pack sets that the source has, and show what was written."""
    from mpiflow.io.pack import pack_sets

    with Bar() as bar:
        pack_sets(
            sets, options.out, shuffle=options.shuffle, seed=options.seed,
            storage=_storage(options), overwrite=options.overwrite, progress=bar,
        )  # fmt: skip
    _print_sets(options, tuple(sets))


def _print_sets(options: Namespace, names: tuple[str, ...]) -> None:
    from mpiflow.io.info import info, info_text
    from mpiflow.io.pack.sets import is_pattern

    out = Path(options.out)
    for pattern in [out] if is_pattern(out) else [out / f"{name}-*.h5" for name in names]:
        print(info_text(info(str(pattern), Path("."))))


def _folder(options: Namespace) -> Path:
    """The folder of the packed files."""
    from mpiflow.io.pack.sets import is_pattern

    out = Path(options.out)
    return out.parent if is_pattern(out) else out


def _beside(options: Namespace, name: str) -> Path:
    return _folder(options) / name


def _storage(options: Namespace) -> Storage:
    from mpiflow.io.pack import Storage

    shards: int | tuple[int, ...] | None = None
    if options.shards:
        counts = options.shards.split(",")
        if not all(re.fullmatch(r" *0*[1-9]\d* *", count) for count in counts):
            raise UsageError(f"--shards {options.shards}: write a number of files, or the rows of"
                             " each: 400,377")  # fmt: skip
        shards = int(counts[0]) if len(counts) == 1 else tuple(map(int, counts))
    return Storage(shards, options.shard_rows, options.chunk_rows, options.compression)


def _test(text: str | None) -> float:
    """The rows to test, or their share; zero for none."""
    if text is None:
        return 0
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf") or (number >= 1 and number != int(number)):
        raise UsageError(f"--test {text}: write a share such as 0.1, or a number of rows")
    return number


def _image_size(text: str | None) -> tuple[int, int] | None:
    """Height and width from 64 or, as images are named, WIDTHxHEIGHT."""
    if text is None:
        return None
    if not (found := re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)):
        raise UsageError(f"--size {text}: write a number of pixels, or WIDTHxHEIGHT")
    return int(found[2] or found[1]), int(found[1])


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
