"""Plans as JSON: canonical bytes, digests, files. What is read is checked before it is used.

A record is an object of its fields, those with their default left out; a layout is its text, a
mesh and arenas are lists of pairs, where an axis may have a list of sizes, one for each stage;
attributes hold lists, never tuples. The file is the canonical object with the plan's digest beside
it, so a cut or edited file is refused. Whether the plan it holds would run is `verify`'s to say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mpiflow.errors import PlanError, SbpError, UsageError
from mpiflow.garbage import no_collection
from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.graph.sbp import Layout, layout_text, parse_layout
from mpiflow.plan.records import FORMAT, Plan
from mpiflow.plan.slice import itemsize

_LARGEST = 2**63 - 1


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as an object of JSON types."""
    encoded: dict[str, Any] = _encode(plan, Plan, "plan")
    return {"format": plan.format, **encoded}


def from_json(data: Any, *, version: str = "") -> Plan:
    """The plan that `to_json` gave; PlanError names the first item that is not as it must be.

    Where `version` is given, a plan made by another version of mpiflow is refused.
    """
    if not isinstance(data, dict):
        raise PlanError(f"a plan is a JSON object, this is {_kind(data)}")
    if data.get("format") != FORMAT:
        raise PlanError(
            f"the plan has format {data.get('format')!r}, this mpiflow reads format {FORMAT}; "
            "compile the job again"
        )
    if version and data.get("version") != version:
        raise PlanError(
            f"the plan was made by mpiflow {data.get('version')}, this is mpiflow {version}; "
            "compile the job again"
        )
    plan: Plan = _decode(data, Plan, "")
    return plan


def canonical(plan: Plan) -> bytes:
    """The plan as the one JSON text that its digest is taken of."""
    return _dump(to_json(plan))


def digest(plan: Plan) -> str:
    """SHA-256 of the whole plan; ranks compare it before they start."""
    return content_digest(canonical(plan))


def content_digest(content: bytes) -> str:
    """The digest of the plan of which this is the canonical text."""
    return sha256(content).hexdigest()


def program_digest(plan: Plan) -> str:
    """SHA-256 of what is computed, whatever the ranks, mesh, machine or device."""
    return sha256(_dump([list(section) for section in plan.identity])).hexdigest()


def dumps(plan: Plan) -> bytes:
    """The content of the plan's file: canonical JSON with the digest in it."""
    encoded = to_json(plan)
    return _dump({**encoded, "digest": content_digest(_dump(encoded))}) + b"\n"


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan's file; it is complete under its name or not there at all.

    PlanError where the file system refuses it.
    """
    content = dumps(plan)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def load(path: str | os.PathLike[str], *, version: str = "") -> Plan:
    """The plan in a file that `save` wrote; PlanError where it is missing, cut or edited."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    return loads(content, name=str(path), version=version)


@no_collection()
def loads(content: bytes, *, name: str = "the plan", version: str = "") -> Plan:
    """`load` for the bytes of a plan file; `name` is what messages call it."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name}: is truncated or no plan file: {error}") from None
    stated = data.pop("digest", None) if isinstance(data, dict) else None
    if not isinstance(stated, str):
        raise PlanError(f"{name}: is no plan file: it has no digest")
    spelt = _dump(data)
    found = content_digest(spelt)
    if stated != found:
        raise PlanError(
            f"{name}: was edited or damaged: digest in the file is {stated}, "
            f"its content gives {found}; compile the job again"
        )
    try:
        plan = from_json(data, version=version)
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None
    if canonical(plan) != spelt:
        raise PlanError(f"{name}: spells out values that mpiflow leaves out; it did not write it")
    return plan


def _dump(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


# The fields of a record with their types, and one encoder and decoder over types.


@cache
def _fields(record: type) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(record)
    return tuple((field, hints[field.name]) for field in fields(record))


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _encode(value: Any, kind: Any, path: str) -> Any:
    return _encoder(kind)(value, path)


@cache
def _encoder(kind: Any) -> Callable[[Any, str], Any]:
    """What encodes a value of a type; `path` is where the value stands, for messages."""
    if kind is Mesh:
        return lambda value, path: [list(axis) for axis in value.described().items()]
    if kind == Layout:
        return lambda value, path: layout_text(value)
    if is_dataclass(kind):
        return partial(_encode_record, tuple(
            (field.name, _default(field), _encoder(hint))
            for field, hint in _fields(kind)  # type: ignore[arg-type]
        ))  # fmt: skip
    if get_origin(kind) is tuple:
        return partial(_encode_tuple, kind)
    if get_origin(kind) is dict:
        return lambda value, path: {
            key: _encode_free(item, f"{path}.{key}") for key, item in value.items()
        }
    special = {float: _encode_float, int: _encode_integer}
    return special.get(kind, partial(_encode_plain, kind))


def _encode_record(
    members: tuple[tuple[str, Any, Callable[[Any, str], Any]], ...], value: Any, path: str
) -> dict[str, Any]:
    """The fields that do not have their default."""
    encoded = {}
    for name, default, encode in members:
        item = getattr(value, name)
        if item != default:
            encoded[name] = encode(item, f"{path}.{name}")
    return encoded


def _encode_tuple(kind: Any, value: Any, path: str) -> list[Any]:
    encoders = map(_encoder, _parts(kind, len(value)))
    items = enumerate(zip(value, encoders, strict=True))
    return [encode(item, f"{path}[{i}]") for i, (item, encode) in items]


def _encode_float(value: Any, path: str) -> float:
    if type(value) in (int, float) and 0 <= value <= _LARGEST:
        return float(value)
    raise PlanError(
        f"{path} is {value!r} of {type(value).__name__}, not a float from 0 to {_LARGEST}"
    )


def _encode_plain(kind: type, value: Any, path: str) -> Any:
    if type(value) is not kind:
        raise PlanError(f"{path} is {value!r} of {type(value).__name__}, not {kind.__name__}")
    return value


def _encode_integer(value: Any, path: str) -> int:
    number: int = _encode_plain(int, value, path)
    if not 0 <= number <= _LARGEST:
        raise PlanError(f"{path} is {number}; a plan holds integers from 0 to {_LARGEST}")
    return number


def _encode_free(value: Any, path: str) -> Any:
    """An attribute: None, bool, int, float, str, or a list of them."""
    if type(value) in (list, tuple):
        return [_encode_free(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if type(value) not in (bool, int, float, str, type(None)):
        raise PlanError(
            f"{path} is {value!r} of {type(value).__name__}; a plan holds bool, int, float, str, "
            "None and lists of them"
        )
    if type(value) is float and not isfinite(value):
        raise PlanError(f"{path} is {value}, which JSON cannot hold")
    return value


def _decode(value: Any, kind: Any, path: str) -> Any:
    name = path or "plan"
    if kind is Mesh:
        return _decode_mesh(value, name)
    if kind == Layout:
        return _guard(parse_layout, _expect(value, str, name), name)
    if is_dataclass(kind):
        return _decode_record(value, kind, path)
    if get_origin(kind) is tuple:
        items = _expect(value, list, name)
        parts = _parts(kind, len(items))
        if len(parts) != len(items):
            raise PlanError(f"{name} has {len(items)} items, not {len(parts)}")
        pairs = enumerate(zip(items, parts, strict=True))
        return tuple(_decode(item, part, f"{path}[{i}]") for i, (item, part) in pairs)
    if get_origin(kind) is dict:
        items = _expect(value, dict, name)
        return {key: _decode_free(item, f"{path}.{key}") for key, item in items.items()}
    if kind is float:
        number = float(_expect(value, float, name))
        if not 0 <= number <= _LARGEST:
            raise PlanError(f"{name} is {number}; it must be a number from 0 to {_LARGEST}")
        return number
    if kind is int and not 0 <= _expect(value, int, name) <= _LARGEST:
        raise PlanError(f"{name} is {value}; it must be from 0 to {_LARGEST}")
    return _expect(value, kind, name)


def _decode_record(value: Any, kind: Any, path: str) -> Any:
    given = _expect(value, dict, path or "plan")
    prefix = f"{path}." if path else ""
    known = {field.name: (field, hint) for field, hint in _fields(kind)}
    for key in given:
        if key not in known:
            raise PlanError(f"{prefix}{key} is no field of {kind.__name__}")
    content = {}
    for key, (field, hint) in known.items():
        if key in given:
            content[key] = _decode(given[key], hint, prefix + key)
        elif _default(field) is MISSING:
            raise PlanError(f"{prefix}{key} is missing")
    if "dtype" in content:
        _guard(itemsize, content["dtype"], f"{prefix}dtype")
    return kind(**content)


def _decode_mesh(value: Any, path: str) -> Mesh:
    items = enumerate(_expect(value, list, path))
    text = ",".join([_decode_axis(item, f"{path}[{i}]") for i, item in items])
    return _guard(parse_mesh, text, path)


def _decode_axis(value: Any, path: str) -> str:
    """A pair of name and size, or sizes by stage, as `parse_mesh` reads them."""
    parts = _expect(value, list, path)
    if len(parts) != 2:
        raise PlanError(f"{path} has {len(parts)} items, not 2")
    name = _expect(parts[0], str, f"{path}[0]")
    sizes = parts[1] if isinstance(parts[1], list) else [parts[1]]
    for size in sizes:
        if _decode(size, int, f"{path}[1]") < 1 or not name.isidentifier():
            raise PlanError(
                f"{path} is {name!r} of {size}; an axis has a name of its own and 1 or more ranks"
            )
    return f"{name}={'+'.join(map(str, sizes))}"


def _decode_free(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_decode_free(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) or (type(value) is float and not isfinite(value)):
        raise PlanError(f"{path} is {_kind(value)}; an attribute is a finite number, text or list")
    return value


def _parts(kind: Any, count: int) -> tuple[Any, ...]:
    """The types of the items of a tuple type, one for each of `count` items where it is open."""
    parts = get_args(kind)
    return parts[:1] * count if parts[-1:] == (...,) else parts


def _expect(value: Any, kind: type, path: str) -> Any:
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds:
        raise PlanError(f"{path} is {_kind(value)}, not {_NAMES[kind]}")
    return value


_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false",
          list: "a list", dict: "an object", type(None): "null"}  # fmt: skip


def _kind(value: Any) -> str:
    text = repr(value)
    return f"{_NAMES.get(type(value), type(value).__name__)} {text[:40]}"


def _guard(function: Callable[[str], Any], text: str, path: str) -> Any:
    """`function(text)`, with its complaint turned into one about the plan."""
    try:
        return function(text)
    except (SbpError, UsageError, KeyError) as error:
        reason = "" if isinstance(error, KeyError) else f": {error}"
        raise PlanError(f"{path} is {text!r}, which is not known{reason}") from None
