"""The command line: mpiflow plan | check | simulate | run | predict | data | checkpoint | ..."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from mpiflow import (
    calibrate_commands,
    commands,
    data_commands,
    simulate_commands,
    trace_commands,
    weight_commands,
)
from mpiflow.errors import MpiflowError, UsageError
from mpiflow.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives its exit code.

    0 done, 1 error, 2 usage, 3 stalled, 75 stopped as asked.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        json_wanted = "--json" in given and not {"-h", "--help"} & set(given)
        code = _main_json(given) if json_wanted else _run(given)[1]
        sys.stdout.flush()
        return code
    except MpiflowError as error:
        if not (isinstance(error, UsageError) and _is_later_rank(os.environ)):
            print(f"mpiflow: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("mpiflow: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe has seen enough; leave nothing for the interpreter to flush.
        sys.stderr.close()
        return 0


def _is_later_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as another rank than 0.

    What cannot be meant is found before MPI starts, by every rank alike; one says it.
    """
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
    return any(environment.get(name, "0") != "0" for name in names)


def _main_json(given: list[str]) -> int:
    """`main` with --json: one object, and what a job file prints is among its notes."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            answer, code = _run(given)
        except MpiflowError as error:
            answer, code = {"error": str(error), "kind": type(error).__name__}, error.exit_code
    if said := printed.getvalue().splitlines():
        answer["notes"] = [*answer.get("notes", []), *said]
    print(json.dumps(answer))
    return code


def _run(given: list[str]) -> tuple[dict[str, Any], int]:
    """The JSON object of a command that was asked for one, and the exit code."""
    options = parser().parse_args(given)
    options.answer = {}
    try:
        code = options.command(options)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        name = error.filename if error.filename2 is None else error.filename2
        raise MpiflowError(f"{name}: {error.strerror}") from error
    return options.answer, int(code or 0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; a command's docstring is its help."""
    top = _Parser(
        prog="mpiflow",
        description="Train neural networks as MPI jobs from a plan compiled before the run.",
    )
    top.add_argument("--version", action="version", version=f"mpiflow {__version__}")
    below = top.add_subparsers(metavar="COMMAND", required=True)
    _add_all(below, (*_COMMANDS, *_GROUPS))
    return top


def _add_all(below: Any, entries: tuple[Any, ...]) -> None:
    """Commands (function, arguments), and groups of them (name, help, entries)."""
    for entry in entries:
        if len(entry) == 2:
            _add(below, *entry)
            continue
        name, text, members = entry
        group = below.add_parser(name, help=text, description=text)
        _add_all(group.add_subparsers(metavar="COMMAND", required=True), members)


def _add(below: Any, function: Callable[..., Any], arguments: tuple[_Argument, ...]) -> None:
    name = function.__name__.rpartition("_")[2]
    text = inspect.cleandoc(function.__doc__ or "")
    command = below.add_parser(
        name,
        help=text.splitlines()[0],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=function)
    for names, options in arguments:
        command.add_argument(*names, **options)


_Argument = tuple[tuple[str, ...], dict[str, Any]]


def _argument(*names: str, **options: Any) -> _Argument:
    return names, options


_JSON = _argument("--json", action="store_true", help="one JSON object, and nothing else")
_DATA = _argument(
    "--data", default=".", metavar="FOLDER", help="where file patterns begin (default: here)"
)
_SET = _argument(
    "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the job"
)
_MESH = _argument(
    "--mesh",
    metavar="AXIS=N,...",
    help="arrange the ranks: data=2,model=4; stage=2,data=3+1 for stages of 3 and 1 ranks",
)
_MICRO = _argument(
    "--micro-batches", type=int, metavar="N", help="do each step in N parts, one after another"
)
_RANKS = _argument("--ranks", type=int, metavar="N", help="how many ranks the job will get")
_OPS = _argument(
    "--ops", action="append", default=[], metavar="FILE.py",
    help="run this file, which declares ops that the plan uses",
)  # fmt: skip
_CLUSTER = _argument(
    "--cluster", metavar="NAME|FILE.toml",
    help="the machine to price it for: cpu (default), a100, h100, h200, or a machine file",
)  # fmt: skip
_ZERO = _argument(
    "--zero", type=int, metavar="0|1|2|3",
    help="split over the data axis: 1 optimizer state, 2 gradients too, 3 weights too",
)  # fmt: skip
_MEMORY = _argument(
    "--memory", metavar="SIZE",
    help="what a rank may hold: 40GiB, 1.5GB (default: a device's memory, if the machine says it)",
)  # fmt: skip
_SCHEDULE = _argument(
    "--schedule", metavar="NAME",
    help="how pipeline stages take turns: 1f1b (default), gpipe, interleaved, zero-bubble",
)  # fmt: skip
_VIRTUAL = _argument(
    "--virtual", type=int, metavar="N",
    help="pieces of the model on each stage, with --schedule interleaved",
)  # fmt: skip
_RECOMPUTE = _argument(
    "--recompute", metavar="LEVEL",
    help="compute activations again in the backward pass instead of keeping them: none, selective"
    " (what is cheap), full (layer by layer), auto (what --memory asks for, if that is fastest)",
)  # fmt: skip
_DEVICE = _argument(
    "--device", metavar="NAME",
    help="what computes: cpu (default), cuda, or fake, which is memory of the host that behaves as"
    " a device",
)  # fmt: skip
_ROUTE = _argument(
    "--route", metavar="NAME",
    help="between devices: nccl, mpi (of devices' memory), staged (through the host); default: as"
    " the machine says, else staged",
)  # fmt: skip
_STALL = _argument(
    "--stall", type=float, metavar="SECONDS",
    help="end a run that stands still for so long; 0: never (default: as its own pace says, at"
    " least 5)",
)  # fmt: skip
_OPENED = (
    _argument("--device-seed", type=int, default=0, metavar="N",
              help="with --device fake: which of the orders that a device may choose its streams"
              " go on in"),
    _argument("--share-gpus", action="store_true",
              help="with --device cuda: let several ranks of a host use one GPU"),
    _argument("--strict", action="store_true",
              help="with --device cuda: stop at a kernel that allocates, or waits for the GPU, in a"
              " step that has run before"),
)  # fmt: skip
"""How the device is opened: options of what runs plans."""
_FORM = (
    _RANKS, _MESH, _MICRO, _SCHEDULE, _VIRTUAL, _ZERO, _MEMORY, _RECOMPUTE, _CLUSTER, _DEVICE,
    _ROUTE,
)  # fmt: skip
_OUTPUT = _argument("-o", "--output", metavar="FILE", help="write the plan to FILE (.plan)")
_NAMES = _argument(
    "--names", default="", metavar="MAP",
    help="how a file names weights: a .toml or .json file, torchvision-resnet, hf-bert:heads=N,"
    " hf-gpt2:heads=N, hf-llama:heads=N,kv_heads=N",
)  # fmt: skip
_SEARCH = _argument(
    "--search", action="store_true",
    help="try meshes, micro-batches, schedules and levels of ZeRO that are not given, and show the"
    " best few",
)  # fmt: skip
_PLANS = _argument(
    "--plans", type=int, metavar="N",
    help="with --search: make N plans at most (default: 12); more take longer, and miss less",
)  # fmt: skip
_REPORT = _argument(
    "--memory-report", action="store_true",
    help="show what each stage holds when it holds most, by class, and the largest tensors",
)  # fmt: skip
_AFTER = _argument("--after", metavar="STEP", help="show what a step of the compiler made")
_EXPLAIN = _argument(
    "--explain", metavar="NAME",
    help="show why a node, tensor or variable has its layout, and what others would cost;"
    " evaluate:NAME for one of an evaluation",
)  # fmt: skip

_COMMANDS: tuple[tuple[Callable[..., Any], tuple[_Argument, ...]], ...] = (
    (commands.plan, (_argument("job", metavar="FILE.py[:function]"), *_FORM, _SET, _DATA,
                     _OUTPUT, _SEARCH, _PLANS, _AFTER, _EXPLAIN, _REPORT, _JSON)),
    (commands.check, (_argument("plan", metavar="FILE.plan"), _OPS, _DATA, _JSON)),
    (simulate_commands.simulate, (
        _argument("job", metavar="FILE.plan|FILE.py"), *_FORM, _SET, _DATA, _OPS,
        _argument("--program", default="train", help="train, evaluate, ..."),
        _argument("--steps", type=int, default=3, metavar="N"),
        _argument("--nodes", action="append", default=[], metavar="N,N,...",
                  help="compile the job for each number of nodes: where does scaling end?"),
        _argument("--straggler", metavar="FACTOR@RANK",
                  help="a rank that computes so many times slower, or a stage: 1.3@stage=2"),
        _argument("--factor", action="append", default=[], metavar="STREAM=FACTOR",
                  help="multiply the seconds of a stream, or of its kind: comm=2, comm.data=0.5"),
        _argument("--trace", metavar="FILE.json", help="write what ran when, for Perfetto"),
        _JSON)),
    (commands.diff, (_argument("a", metavar="A.plan"), _argument("b", metavar="B.plan"), _OPS,
                     _JSON)),
    (commands.run, (_argument("job", metavar="FILE.plan|FILE.py"), _MESH, _MICRO,
                    _SCHEDULE, _VIRTUAL, _ZERO, _MEMORY, _RECOMPUTE, _CLUSTER, _DEVICE, _ROUTE,
                    _SET, _DATA, _OPS,
                    _argument("--out", metavar="FOLDER",
                              help="the run's folder (default: run/NAME)"),
                    _argument("--fresh", action="store_true",
                              help="begin anew; the old run is moved aside"),
                    _argument("--steps", type=int, metavar="N",
                              help="train up to step N instead of epochs"),
                    _STALL,
                    _argument("--check-finite", action="store_true",
                              help="look at what each task makes, and name the first nan or"
                              " infinity (slow)"),
                    *_OPENED,
                    _argument("--accept-changes", action="store_true",
                              help="go on from a checkpoint of a changed program"),
                    _argument("--trace", nargs="?", const="", metavar="FIRST:LAST",
                              help="record when each task runs, in these steps (default: the 3rd to"
                              " the 12th of this run; give it after the file, or with =); see"
                              " `mpiflow trace`"))),
    (trace_commands.trace, (
        _argument("run", metavar="RUN", help="the run's folder, as run/digits"),
        _argument("-o", "--output", metavar="FILE.json", help="(default: RUN/trace.json)"),
        _argument("--ranks", default="", metavar="0,5,8:12", help="only these ranks"),
        _JSON)),
    (weight_commands.predict, (
        _argument("job", metavar="FILE.py[:function]"), _MESH, _SET, _DATA,
        _argument("--checkpoint", required=True, metavar="RUN|CHECKPOINT|WEIGHTS",
                  help="what to predict with"),
        _argument("-o", "--output", required=True, metavar="FILE.h5"),
        _argument("--dataset", default="", metavar="NAME|PATTERN",
                  help="what to predict for (default: what evaluates)"),
        _argument("--outputs", default="", metavar="NAME,...",
                  help="default: all that have a value for each row"),
        _NAMES, _argument("--overwrite", action="store_true", help="replace FILE.h5"),
        _STALL, _DEVICE, _ROUTE, *_OPENED)),
    (calibrate_commands.calibrate, (
        _argument("-o", "--output", required=True, metavar="FILE.toml"),
        _argument("--quick", action="store_true", help="fewer sizes and ops, in less time"),
        _argument("--data", metavar="FOLDER",
                  help="measure reading there, not from the system's cache"),
        _argument("--name", metavar="NAME", help="of the machine (default: that of the file)"))),
    (commands.doctor, (_JSON,)),
)  # fmt: skip

_OUT = _argument("out", metavar="OUT", help="a folder, for train-*.h5 and test-*.h5 in it;"
                 " or the files of one set, such as mine/test-*.h5")  # fmt: skip
_PACK = (
    _argument("--test", metavar="SHARE|ROWS", help="keep 0.1 or 1000 rows to test with"),
    _argument("--shuffle", action="store_true", help="in a random order"),
    _argument("--seed", type=int, default=0, metavar="N", help="of what is random (default: 0)"),
    _argument("--shards", metavar="N|ROWS,ROWS,...",
              help="how many files, or their rows (default: files of 256 MiB)"),
    _argument("--shard-rows", type=int, metavar="N", help="rows of each file"),
    _argument("--chunk-rows", type=int, metavar="N",
              help="rows of each HDF5 chunk, which are read together (default: 1 MiB at most)"),
    _argument("--compression", choices=("gzip", "lzf"), help="default: none"),
    _argument("--overwrite", action="store_true", help="replace files of these names"),
)  # fmt: skip
_FILES = _argument("file", nargs="+", metavar="FILE", help="one or more, plain or with gzip")

_PACKERS = (
    (data_commands.pack_arrays, (
        _argument("source", metavar="FILE.npz|MODULE.py:FUNCTION"), _OUT, *_PACK)),
    (data_commands.pack_images, (
        _argument("folder", metavar="FOLDER", help="with a folder for each class"), _OUT,
        _argument("--size", metavar="N|WxH", help="make all images this size, in pixels"),
        _argument("--fit", choices=("crop", "pad", "stretch"),
                  help="how: cut around the middle, add black, or distort (default: crop)"),
        _argument("--gray", action="store_true", help="one channel, not three"), *_PACK)),
    (data_commands.pack_idx, (
        _argument("source", nargs="+", metavar="FOLDER|FIELD=FILE"), _OUT, *_PACK)),
    (data_commands.pack_csv, (
        _FILES, _OUT,
        _argument("--field", action="append", default=[],
                  metavar="NAME[=COLUMN,FIRST..LAST][:DTYPE[:SHAPE]]",
                  help="a field, as in x=a,b:float32; the DTYPE category is for names"),
        _argument("--delimiter", default=",", metavar="C", help="between cells (default: a comma)"),
        _argument("--no-header", action="store_true",
                  help="the first line has numbers; columns are called 1, 2, ..."), *_PACK)),
    (data_commands.pack_text, (
        _FILES, _OUT,
        _argument("--length", type=int, required=True, metavar="N",
                  help="tokens of a row; to predict the next token, one more than the context"),
        _argument("--vocabulary", type=int, metavar="N", help="learn a tokenizer of N tokens"),
        _argument("--kind", choices=("bpe", "wordpiece"),
                  help="of bytes as GPT-2's, or of lower-case words as BERT's (default: bpe)"),
        _argument("--tokenizer", metavar="FILE.json", help="use this one, a tokenizer.json"),
        _argument("--documents", choices=("none", "file", "blank", "line"), default="none",
                  help="a document ends where a file does, at blank lines, with each line; a token"
                  " marks it (default: none)"),
        _argument("--pairs", action="store_true",
                  help="two pieces of a document a row, with masked tokens: as BERT's"), *_PACK)),
)  # fmt: skip

_GROUPS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("data", "Make and examine data files.", (
        ("pack", "Make data files of arrays, images, tables or text.", _PACKERS),
        (data_commands.data_info, (_argument("pattern", metavar="PATTERN"), _DATA, _JSON)),
    )),
    ("checkpoint", "Examine checkpoints; weights in and out.", (
        (commands.checkpoint_info, (
            _argument("path", metavar="RUN|CHECKPOINT"),
            _argument("--deep", action="store_true", help="read and verify every byte"), _JSON)),
        (weight_commands.checkpoint_export, (
            _argument("path", metavar="RUN|CHECKPOINT"),
            _argument("-o", "--output", required=True, metavar="FILE.safetensors|FILE.npz"),
            _NAMES,
            _argument("--average", action="store_true", help="averages in the place of weights"),
            _argument("--all", action="store_true", help="also what the optimizer keeps"), _JSON)),
        (weight_commands.checkpoint_import, (
            _argument("job", metavar="FILE.py[:function]"),
            _argument("weights", metavar="FILE.safetensors|FILE.npz|RUN"),
            _argument("-o", "--output", metavar="FOLDER",
                      help="the run's folder (default: run/NAME)"),
            _NAMES,
            _argument("--without", action="append", default=[], metavar="PATTERN",
                      help="variables that begin as the model says: 'head.*'"),
            _argument("--ignore", action="append", default=[], metavar="PATTERN",
                      help="tensors of the file that nothing uses"), _SET, _DATA, _JSON)),
    )),
)  # fmt: skip
