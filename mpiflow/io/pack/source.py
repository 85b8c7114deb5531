"""Arrays, an .npz file or a Python function as rows, or as a stream of pieces."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.errors import DataError, UsageError
from mpiflow.io.pack.rows import ArrayRows, Arrays, Part, Rows

Source = Rows | Mapping[str, Any] | Iterable[Mapping[str, Any]] | Callable[[], Any] | str | Path


def open_source(source: Source) -> Rows | Iterator[Arrays]:
    """Rows, or a stream of pieces of them, in which every field has equally many rows."""
    given: Any = source
    if isinstance(source, str | Path):
        text = str(source)
        given = _call(text) if ".py:" in text else _load_npz(Path(text))
    elif callable(source):
        given = source()
    if isinstance(given, Rows):
        return given
    if isinstance(given, Mapping):
        return ArrayRows(_checked(given, None))
    if not isinstance(given, Iterable):
        raise DataError(
            f"the source gives {type(given).__name__}; it must give a mapping of names to arrays, "
            "or yield such mappings"
        )
    return _stream(iter(given))


def _call(text: str) -> Any:
    """What the function named by `folder/module.py:function` returns."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"{text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As Python does for a script: it may import its neighbours.
    sys.path.insert(0, str(path.parent.absolute()))
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, name, None)):
            raise UsageError(f"{text}: {path} has no function {name!r}")
        return getattr(module, name)()
    finally:
        sys.path.remove(str(path.parent.absolute()))


def _load_npz(path: Path) -> Arrays:
    """The arrays of an .npz file, which may hold no Python objects."""
    if not path.is_file():
        raise UsageError(f"no such file {path}; give arrays as FILE.npz or MODULE.py:FUNCTION")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path} holds one array without a name; save it with numpy.savez")
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError) as problem:
        raise DataError(f"{path}: not an .npz file of plain arrays: {problem}") from problem


def _stream(pieces: Iterator[Mapping[str, Any]]) -> Iterator[Arrays]:
    """The pieces that a function yields, each checked against the first."""
    first: Arrays | None = None
    for piece in pieces:
        if not isinstance(piece, Mapping):
            raise DataError(
                f"the source yields {type(piece).__name__}; it must yield mappings of names to "
                "arrays of rows"
            )
        arrays = _checked(piece, first)
        first = first or {name: array[:0].copy() for name, array in arrays.items()}
        yield from Part(ArrayRows(arrays)).pieces()


def _checked(piece: Mapping[str, Any], first: Arrays | None) -> Arrays:
    """The arrays in native byte order; DataError unless they are numbers and fit together."""
    arrays = {str(name): np.asarray(array) for name, array in sorted(piece.items())}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise DataError(f"field {name!r} has dtype {array.dtype}; only numbers can be packed")
        if array.ndim == 0:
            raise DataError(f"field {name!r} is a single value; fields need a row dim")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"all fields need the same number of rows; there are {lengths or 'none'}")
    if first is not None:
        _compare(arrays, first)
    return {
        name: array.astype(array.dtype.newbyteorder("="), copy=False)
        for name, array in arrays.items()
    }


def _compare(arrays: Arrays, first: Arrays) -> None:
    """DataError where a piece has other fields, dtypes or row shapes than the first."""
    found, expected = (
        {name: f"{array.dtype} {array.shape[1:]}" for name, array in some.items()}
        for some in (arrays, first)
    )
    if found != expected:
        raise DataError(f"pieces differ: the first has {expected}, a later one {found}")
