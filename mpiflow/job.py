"""Job: what a user's file returns. Model, data, optimizer and run settings, for any ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpiflow.errors import JobError
from mpiflow.graph.tensor import Tensor
from mpiflow.optim import Optimizer

PRECISIONS = ("float32", "float16", "bfloat16")
Model = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Sharded HDF5 files: a glob pattern relative to the data folder, and how rows are used.

    `batch` is the whole job's batch, in rows. `fields` (name -> (row shape, dtype)) and `rows`
    declare the data for planning where the files are absent. `lanes` and `window` (chunks) bound
    the memory of a shuffle; the order depends on them, never on the ranks. Where no file matches,
    `make` is called with the data folder when the plan is made, and writes them.
    """

    pattern: str
    batch: int
    shuffle: bool = False
    seed: int = 0
    fields: Mapping[str, tuple[tuple[int, ...], str]] | None = None
    rows: int | None = None
    lanes: int = 16
    window: int = 4
    make: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        _check_kind("Dataset: the pattern", self.pattern, str)
        for name in ("batch", "lanes", "window"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise JobError(f"Dataset {self.pattern!r}: {name} must be at least 1, not {value}")
        _check_seed(f"Dataset {self.pattern!r}", self.seed)
        if self.rows is not None and self.fields is None:
            raise JobError(f"Dataset {self.pattern!r}: rows are declared but no fields")


@dataclass(frozen=True, slots=True)
class Every:
    """How often something happens: each so many steps, epochs or minutes, whichever comes.

    For saving, `keep` is how many checkpoints stay.
    """

    steps: int = 0
    epochs: int = 0
    minutes: float = 0.0
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "keep"):
            _check_kind(f"Every: {name}", getattr(self, name), int)
        if min(self.steps, self.epochs) < 0 or self.keep < 1 or not 0 <= self.minutes < math.inf:
            raise JobError(f"{self}: counts are not negative, and at least one checkpoint is kept")


@dataclass(frozen=True, slots=True)
class Best:
    """The metric by which checkpoints are compared: "accuracy", or "NAME.accuracy".

    The best checkpoint is kept; after `patience` evaluations without a better one (0: never) the
    run ends. `mode` is "max" or "min".
    """

    metric: str
    mode: str = "max"
    patience: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise JobError(f"Best: mode is 'max' or 'min', not {self.mode!r}")
        if self.patience < 0:
            raise JobError(f"Best: patience is not negative, {self.patience} was given")


@dataclass(frozen=True, slots=True)
class Weights:
    """A file that the variables of a new run begin with, relative to the data folder.

    It is .safetensors, .npz, or a run or a checkpoint of mpiflow. `names` maps our names to those
    of the file: "torchvision-resnet", "hf-bert:heads=12" or a .toml file. Variables whose name fits
    a pattern of `without` ("head.*") begin as the model says; tensors of the file that nobody needs
    are named by `ignore`. Anything else that does not fit is an error.
    """

    path: str
    names: str = ""
    without: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("path", "names"):
            _check_kind(f"Weights: {name}", getattr(self, name), str)
        for name in ("without", "ignore"):
            _check_patterns(f"Weights {self.path!r}: {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class Job:
    """A training job. `evaluate` is one data set, or several by name.

    In `precision` float16 or bfloat16 products and convolutions are 16-bit, and variables float32.
    `init` is what a new run begins with. Variables whose name fits a pattern of `frozen`
    ("block*") never change, and have neither gradient nor optimizer state. A training step is done
    in so many `micro_batches`, one after another, each an equal part of the batch.
    """

    name: str
    model: Model
    train: Dataset
    optimizer: Optimizer
    evaluate: Dataset | Mapping[str, Dataset] | None = None
    epochs: int = 1
    save: Every = field(default_factory=lambda: Every(epochs=1))
    evaluate_every: Every = field(default_factory=lambda: Every(epochs=1))
    best: Best | None = None
    seed: int = 0
    precision: str = "float32"
    init: str | Weights | None = None
    frozen: tuple[str, ...] = ()
    micro_batches: int = 1

    def __post_init__(self) -> None:
        self._check_kinds()
        if not self.name[:1].isalnum() or not all(c.isalnum() or c in "-_." for c in self.name):
            raise JobError(
                f"job name {self.name!r}: use letters, digits, '-', '_' and '.', and begin with a"
                " letter or digit; it names a folder"
            )
        _check_seed(f"job {self.name}", self.seed)
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise JobError(f"job {self.name}: epochs must be at least 1, not {self.epochs}")
        if self.precision not in PRECISIONS:
            raise JobError(
                f"job {self.name}: precision is one of {', '.join(PRECISIONS)},"
                f" not {self.precision!r}"
            )
        self._check_micro_batches()
        if self.evaluate_every.minutes:
            raise JobError(
                f"job {self.name}: evaluate_every takes steps or epochs, so that every rank count"
                " evaluates at the same step"
            )
        if self.best and not self.evaluations:
            raise JobError(f"job {self.name}: best={self.best.metric!r} needs evaluate=")

    def _check_micro_batches(self) -> None:
        count, batch = self.micro_batches, self.train.batch
        if type(count) is not int or count < 1 or batch % count:
            raise JobError(
                f"job {self.name}: a batch of {batch} rows cannot be cut into {count!r}"
                " micro-batches; choose a number that divides it"
            )

    def _check_kinds(self) -> None:
        what = f"job {self.name}: "
        _check_kind("job: the name", self.name, str)
        _check_kind(f"{what}model", self.model, Callable)
        _check_kind(f"{what}train", self.train, Dataset)
        _check_kind(f"{what}optimizer", self.optimizer, Optimizer)
        if not isinstance(self.evaluate, Dataset | Mapping | None):
            _check_kind(f"{what}evaluate", self.evaluate, Dataset)
        for name, data in self.evaluations.items():
            _check_kind(f"{what}evaluate[{name!r}]", data, Dataset)
        _check_kind(f"{what}save", self.save, Every)
        _check_kind(f"{what}evaluate_every", self.evaluate_every, Every)
        if self.best is not None:
            _check_kind(f"{what}best", self.best, Best)
        if not isinstance(self.init, str | Weights | None):
            _check_kind(f"{what}init", self.init, Weights)
        _check_patterns(f"{what}frozen", self.frozen)

    @property
    def evaluations(self) -> dict[str, Dataset]:
        """The evaluation data sets by name; a single one is named "evaluate"."""
        if self.evaluate is None:
            return {}
        if isinstance(self.evaluate, Dataset):
            return {"evaluate": self.evaluate}
        return dict(self.evaluate)

    @property
    def weights(self) -> Weights | None:
        """`init` in full."""
        return Weights(self.init) if isinstance(self.init, str) else self.init


def _check_patterns(what: str, patterns: object) -> None:
    if not isinstance(patterns, tuple) or not all(isinstance(p, str) for p in patterns):
        raise JobError(f'{what} is a tuple of name patterns, such as ("head.*",), not {patterns!r}')


def _check_kind(what: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        raise JobError(f"{what} must be of {kind.__name__}, it is {value!r}")


def _check_seed(what: str, seed: int) -> None:
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise JobError(f"{what}: a seed is a whole number from 0 to 2**63 - 1, not {seed!r}")
