"""A small job and its data for the tests of the command line, and faults planted in its ranks."""

import json
from pathlib import Path

import numpy as np

from mpiflow.io.pack import pack

ROOT = Path(__file__).parents[2]
FEATURES, CLASSES, ROWS, TEST_ROWS = 12, 5, 275, 83

JOB = '''
"""Points in {classes} classes."""

import mpiflow as mf
from mpiflow import nn


def job(batch: int = 32, width: int = 9, lr: float = 0.1, epochs: int = 5) -> mf.Job:
    train = mf.Dataset("train-*.h5", batch=batch, shuffle=True, seed=3, lanes=4, window=2)
    test = mf.Dataset("test-*.h5", batch=batch)

    def model(batch):
        x = mf.relu(nn.Dense(width, name="fc1")(batch["x"]))
        logits = nn.Dense({classes}, name="out")(x)
        hit = mf.equal(mf.argmax(logits), batch["label"])
        return {{
            "loss": mf.mean(mf.cross_entropy(logits, batch["label"])),
            "accuracy": mf.mean(hit),
            "hits": mf.total(hit),
        }}

    return mf.Job("points", model, train=train, epochs=epochs,
                  optimizer=mf.SGD(lr=lr, momentum=0.9), {settings})
'''

STAGED = ("--mesh", "stage=2", "--micro-batches", 2)
"""Options for two pipeline stages."""
PINNED = (
    'x = mf.relu(nn.Dense(width, name="fc1")(batch["x"]))',
    'x = nn.Dense(width, name="fc1")(batch["x"])\n'
    "        with mf.stage(1):\n"
    "            x = mf.relu(x)",
)
"""A change of the job that puts its second half on the second stage."""
BY_ROW = ('"hits": mf.total(hit),', '"hits": mf.total(hit), "logits": logits, "hit": hit,')
"""A change of the job that has outputs to predict: a value for each row."""

SITE = '''
import ctypes
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time


def plant():
    from mpiflow.exec.session import Session
    from mpiflow.exec.transport import Operation
    from mpiflow.io.dataset import DatasetReader
    from mpiflow.metrics import Metrics
    from mpiflow.ops.elementwise import Relu

    if record := os.environ.get("RECORD"):
        plain_read = DatasetReader.read

        def recording(self, step, rows, out):
            plain_read(self, step, rows, out)
            if self.dataset.name == "train":
                read = [self.describe(step, row) for row in range(*rows)]
                with open(f"{record}-{os.getpid()}", "a") as file:
                    print(json.dumps([step, rows[0], read]), file=file)

        DatasetReader.read = recording

    rank, kind, at = os.environ.get("FAULT", "none:none:0").split(":")
    if rank != os.environ.get("PMI_RANK"):
        return
    at = int(at)
    make, leave = Session._bind, Session.close
    run, read, bind, calls = Session.run, DatasetReader.read, Relu.bind, []
    start = Operation.start

    def mark():
        if path := os.environ.get("MARK"):
            open(path, "w").close()

    def run_with_fault(self, program, step=0):
        if program in ("train", "predict") and step == at:
            mark()
            if kind == "disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            elif kind == "main":
                raise RuntimeError("planted")
            elif kind == "host":
                time.sleep(1000)
            elif kind == "pause":
                subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                os.kill(os.getpid(), getattr(signal, kind))
        return run(self, program, step)

    def read_with_fault(self, step, rows, out):
        if (self.dataset.name, step) == ("train", at):
            mark()
            if kind == "slow":
                self.reading = "train-001.h5 row 3"
                time.sleep(1000)
            raise OSError(5, "Input/output error")
        read(self, step, rows, out)

    def make_with_fault(self, program):
        mark()
        while kind == "unbound":
            pass
        os.kill(os.getpid(), signal.SIGTERM if kind == "asked" else signal.SIGSTOP)
        return make(self, program)

    def leave_with_fault(self):
        mark()
        os.kill(os.getpid(), signal.SIGSTOP)
        leave(self)

    def store_with_fault(self):
        mark()
        time.sleep(1000)

    def open_with_fault(self, *arguments, **more):
        mark()
        time.sleep(1000)

    def bind_with_fault(self, *arrays):
        kernel = bind(self, *arrays)

        def kernel_with_fault():
            calls.append(arrays)
            if len(calls) == at + 1:
                mark()
                if kind == "endless":
                    while True:
                        calls[0]
                elif kind == "frozen":  # in C, and no other thread of Python may run
                    ctypes.PyDLL(None).sleep(1000)
                raise FloatingPointError("planted")
            kernel()

        return kernel_with_fault

    def start_with_fault(self):
        """As if what this rank sends were lost: it believes to have begun, and never has.

        Or as if the call of MPI that begins it did not return.
        """
        calls.append(self)
        if len(calls) == at + 1:
            mark()
            if kind == "deaf":
                time.sleep(1000)
            self._active, self._is_done = True, lambda: False
            return self
        return start(self)

    if kind in ("reader", "slow"):
        DatasetReader.read = read_with_fault
    elif kind in ("binding", "unbound", "asked"):
        Session._bind = make_with_fault
    elif kind == "leaving":
        Session.close = leave_with_fault
    elif kind == "storing":
        Metrics.close = store_with_fault
    elif kind == "opening":
        DatasetReader.__init__ = open_with_fault
    elif kind in ("kernel", "endless", "frozen"):
        Relu.bind = bind_with_fault
    elif kind in ("lost", "deaf"):
        Operation.start = start_with_fault
    else:
        Session.run = run_with_fault


class Finder(importlib.abc.MetaPathFinder):
    """Plants the fault as soon as the program has imported what it needs."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("mpiflow.train", "mpiflow.predict"):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), plant())
        return spec


sys.meta_path.insert(0, Finder())
'''


def on_device(device, route):
    """The options of a command that makes plans, for the device that pytest was asked for."""
    return ("--device", "fake", "--route", route) if device == "fake" else ()


def write_job(folder, settings="evaluate=test", name="job.py", change=("", "")):
    """A job file in `folder`; `settings` are further arguments of mf.Job."""
    text = JOB.format(classes=CLASSES, settings=settings)
    assert change[0] in text
    path = folder / name
    path.write_text(text.replace(*change) if change[0] else text)
    return path


def write_data(folder, label=None):
    """Training and test files in `folder`; gives the test rows. `label` is put into row 7."""
    random = np.random.RandomState(0)
    centres = random.randn(CLASSES, FEATURES)
    sets = {}
    for name, shards in (("train", (101, 60, 114)), ("test", (50, 33))):
        labels = random.randint(0, CLASSES, sum(shards))
        x = centres[labels] + random.randn(sum(shards), FEATURES)
        if name == "train" and label is not None:
            labels[7] = label
        sets[name] = {"x": x.astype(np.float32), "label": labels.astype(np.int64)}
        out = f"{folder}/{name}-*.h5"
        pack(sets[name], out, shards=list(shards), chunk_rows=16, overwrite=True)
    return sets["test"]


class Runner:
    """Runs `mpiflow run` on the job in a folder, and reads what the run left there."""

    def __init__(self, mpiexec, folder):
        self.mpiexec, self.folder, self.site = mpiexec, folder, folder / "site"
        self.device = mpiexec.keywords["device"]  # what `mpiflow plan` needs for the same device
        self.site.mkdir(exist_ok=True)
        (self.site / "sitecustomize.py").write_text(SITE)

    def __call__(self, ranks, *options, out="run", job="job.py", timeout=60, **variables):
        job = self.folder / job
        return self.mpiexec(
            ranks, "-m", "mpiflow", "run", job, "--data", self.folder, "--out", self.folder / out,
            *options, timeout=timeout, PYTHONPATH=f"{self.site}:{ROOT}", **variables,
        )  # fmt: skip

    def train(self, ranks, *options, **keywords):
        """A run that ends well; gives its metrics."""
        done = self(ranks, *options, **keywords)
        assert done.returncode == 0, done.stdout
        return self.rows(keywords.get("out", "run"))

    def rows(self, out="run"):
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def checkpoints(self, out="run"):
        return sorted(path.name for path in (self.folder / out / "checkpoints").iterdir())


def steps_of(rows):
    return [row for row in rows if "seconds" in row]


def evaluations_of(rows):
    return [row for row in rows if "evaluation" in row]


def relative(ours, theirs, key="loss"):
    """The largest relative difference of a value over two lists of rows."""
    assert len(ours) == len(theirs)
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, theirs, strict=True))
