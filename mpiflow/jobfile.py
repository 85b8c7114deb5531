"""Job files: from FILE.py[:function] and --set NAME=VALUE to a Job."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from types import ModuleType
from typing import Any, get_type_hints

from mpiflow.errors import JobError, MpiflowError, UsageError
from mpiflow.graph.tensor import Tensor
from mpiflow.job import Dataset, Job, Model

_PACKAGE = str(Path(__file__).resolve().parent)
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in (_PACKAGE, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)
"""Folders of what the user did not write."""
_LINE = re.compile(r"\.py:\d")


def load_job(target: str, settings: Sequence[str] = ()) -> tuple[Job, Path]:
    """The job that a file's function returns, and the folder of the file.

    `settings` are NAME=VALUE texts for the function's arguments. Whatever the file raises, while
    it is loaded or when its model is called, is an MpiflowError that names the user's line.
    """
    name, _, function_name = target.partition(":")
    path = Path(name)
    if path.suffix != ".py":
        raise UsageError(f"{name}: a job file ends in .py, a plan in .plan")
    if not path.is_file():
        raise UsageError(f"{name}: no such file (in {Path.cwd()})")
    module = _import(path)
    function = getattr(module, function_name or "job", None)
    if not callable(function):
        raise JobError(
            f"{name} has no function {function_name or 'job'!r}; write `def job(...) -> mf.Job`,"
            f" or name the function: {name}:FUNCTION"
        )
    arguments = parse_settings(function, settings, target)
    job = _calling(path, lambda: function(**arguments))
    if not isinstance(job, Job):
        raise JobError(f"{target} returned {type(job).__name__}, not an mpiflow Job")
    job = replace(
        job,
        model=_explained(path, job.model),
        train=_made(path, job.train),
        evaluate={name: _made(path, data) for name, data in job.evaluations.items()},
    )
    return job, path.resolve().parent


def load_ops(files: Sequence[str]) -> None:
    """Run files that declare ops of the user's own, which registers them.

    This runs their code: they are job files, or what the user named with --ops, never what a plan
    names.
    """
    for name in files:
        path = Path(name)
        if path.suffix != ".py":
            raise UsageError(f"--ops {name}: ops are declared in a .py file")
        if not path.is_file():
            raise UsageError(f"--ops {name}: no such file (in {Path.cwd()} on {gethostname()})")
        _import(path)


def _made(path: Path, data: Dataset) -> Dataset:
    """The data set, whose `make` raises an MpiflowError that names the user's line."""
    make = data.make
    if make is None:
        return data
    return replace(data, make=lambda folder: _calling(path, lambda: make(folder)))


def _explained(path: Path, model: Model) -> Model:
    def explained(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = _calling(path, lambda: model(batch))
        return outputs

    return explained


def parse_settings(
    function: Callable[..., Any], settings: Sequence[str], target: str
) -> dict[str, Any]:
    """Arguments of `function` from NAME=VALUE texts, as the types of its parameters ask."""
    parameters = _settable(function)
    try:
        hints = get_type_hints(function)
    except (NameError, AttributeError, TypeError):
        hints = {}
    arguments = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: write --set NAME=VALUE")
        if name not in parameters:
            known = ", ".join(map(_default_text, parameters.values())) or "none"
            raise UsageError(f"--set {text}: {target} has no setting {name!r}; it has {known}")
        default = parameters[name].default
        kind = hints.get(name, type(default) if default is not inspect.Parameter.empty else str)
        arguments[name] = _value(text, value, kind)
    for parameter in parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.name not in arguments:
            raise UsageError(
                f"{target}: the setting {parameter.name!r} has no default; give it with"
                f" --set {parameter.name}=VALUE"
            )
    return arguments


def _settable(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be given by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind in by_name}


def _default_text(parameter: inspect.Parameter) -> str:
    empty = parameter.default is inspect.Parameter.empty
    return parameter.name if empty else f"{parameter.name}={parameter.default!r}"


def _value(setting: str, text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind in (int, float, bool) and type(value) is not kind:
        raise UsageError(f"--set {setting}: {text!r} is not {_article(kind)}")
    return value


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}[kind]


def _import(path: Path) -> ModuleType:
    """Run the file as a module of its own, with its folder to import from."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"mpiflow_job_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    _calling(path, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _calling(path: Path, function: Callable[[], Any]) -> Any:
    """What a function of the user's file gives; what it raises, with the line that raised it."""
    try:
        return function()
    except MpiflowError as error:
        line = _line(path, error)
        if _LINE.search(str(error)) or not line.startswith(str(path.resolve())):
            raise
        raise type(error)(f"{error}\n  {line}") from error
    except SystemExit as error:
        raise JobError(f"the job file left by sys.exit({error.code!r})\n"
                       f"  {_line(path, error)}") from error  # fmt: skip
    except Exception as error:
        raise JobError(f"{type(error).__name__}: {error}\n  {_line(path, error)}") from error


def _line(path: Path, error: BaseException) -> str:
    """Where in the user's file an error came from; and where else in what the user wrote."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path.resolve())]
    # Compiled modules give paths of their makers, which are relative.
    others = [
        frame
        for frame in frames
        if os.path.isabs(frame.filename) and not frame.filename.startswith(_INSTALLED)
    ]
    ends = (own[-1:] + others[-1:]) or frames[-1:]
    return "\n  ".join(dict.fromkeys(f"{frame.filename}:{frame.lineno}" for frame in ends))
