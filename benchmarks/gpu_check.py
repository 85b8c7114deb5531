"""Validates and measures the GPU path on one GPU, in one run of at most eight minutes.

    python benchmarks/gpu_check.py [--out FOLDER] [--budget SECONDS] [--only NAME,NAME]
    python benchmarks/gpu_check.py --dry-run        without a GPU: that it does not die of a typo

Each check has a time cap, prints one line at once, and leaves a line of JSON in FOLDER/gpu.jsonl;
those that start ranks do so in processes of their own. A check that fails, or runs out of time,
keeps what it had found, and does not stop the others. Exits with 1 if any failed. A dry run has
NumPy behind CuPy's functions, in the runs of training too, and measures nothing.

Two ranks need mpi4py with an MPI, and its mpiexec: pip install 'mpiflow[mpi]'.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/unit/ops")]

from mpiflow.errors import MpiflowError  # noqa: E402
from mpiflow.exec.cuda_device import CudaDevice  # noqa: E402
from mpiflow.testing.devices import deviation, run_with  # noqa: E402
from mpiflow.testing.kernels import whole  # noqa: E402

Found = dict[str, Any]
"""What a check has found so far, by name; it goes to the file as JSON."""
Check = Callable[["Bench", Found], None]
CHECKS: dict[str, tuple[int, Check]] = {}
TRAINED = {
    "digits": ("examples/digits.py", ()),
    "gpt": ("examples/gpt.py", ("vocabulary=64", "batch=32", "warmup=5", "lr=0.01")),
    "gpt in bfloat16": (
        "examples/gpt.py",
        ("vocabulary=64", "batch=32", "warmup=5", "lr=0.01", "precision=bfloat16"),
    ),
    "resnet": (
        "examples/images.py",
        ("model=resnet18", "size=16", "classes=4", "batch=32", "warmup=5"),
    ),
}
"""Jobs that make their own data, but for digits, which is packed from scikit-learn's."""
DRY = {"gpt": ("batch=8",), "gpt in bfloat16": ("batch=8",), "resnet": ("size=12", "batch=8")}
"""What they are given besides in a dry run."""
STEPS, DRY_STEPS = 40, 4
SIZES = (512, 2048, 8192)
LIMITS = {"float32": 1e-5, "float64": 1e-12, "float16": 2e-3, "bfloat16": 1e-2}
"""How far products of a dtype may be off; bfloat16 is left out where NumPy has none."""
if importlib.util.find_spec("ml_dtypes") is None:
    del LIMITS["bfloat16"]
else:
    importlib.import_module("ml_dtypes")
APART = {"gpt in bfloat16": 2e-2}
"""How far losses may be from those of the CPU, relatively, where that is not 1e-3."""
LEAST_SECONDS = 10
"""A check is left out that has less time."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A device to check, and whether it is none."""

    device: CudaDevice
    dry: bool
    folder: Path

    def put(self, array: np.ndarray) -> Any:
        """A copy on the device."""
        flat = self.device.allocate(array.nbytes)
        there = flat.view(array.dtype).reshape(array.shape)
        self.device.fill(there, array)
        return there

    @contextmanager
    def on_stream(self) -> Any:
        """Kernels go to a stream of their own."""
        with self.device.driver.on(self.device.driver.stream(0)):
            yield


class Overdue(BaseException):
    """A check took longer than its cap. No Exception: those are caught where one of many fails."""


def check(seconds: int) -> Callable[[Check], Any]:
    """Register a check that may take so long."""

    def register(function: Check) -> Any:
        CHECKS[function.__name__] = (seconds, function)
        return function

    return register


def require(holds: object, message: str) -> None:
    """AssertionError unless it holds."""
    if not holds:
        raise AssertionError(message)


@check(10)
def environment(bench: Bench, found: Found) -> None:
    """What this ran on."""
    found |= {"python": sys.version.split()[0], "numpy": np.__version__, "mpiexec": _mpiexec()}
    gpu = bench.device.driver.gpu(0)
    found |= {"gpu": gpu.name, "gpus": bench.device.driver.count(), "cpus": os.cpu_count()}
    if not bench.dry:
        cupy = bench.device.driver.arrays
        found |= {
            "cupy": cupy.__version__,
            "runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "driver": cupy.cuda.runtime.driverGetVersion(),
        }


@check(90)
def ops(bench: Bench, found: Found) -> None:
    """Every op's kernel against NumPy's, on the examples of its tests; twice, for its bits."""
    from op_examples import EXAMPLES

    import mpiflow.ops  # noqa: F401  (registers the ops)

    found |= {"right": 0, "worst": 0.0, "bits vary": [], "wrong": {}}
    with bench.on_stream():
        for name, examples in EXAMPLES.items():
            try:
                varies = [_compare_op(bench, found, *example) for example in examples]
            except Exception as error:
                found["wrong"][name] = f"{type(error).__name__}: {error}"[:300]
                continue
            found["right"] += 1
            found["bits vary"] += [name] if any(varies) else []
    require(not found["wrong"], f"{len(found['wrong'])} of {len(EXAMPLES)} ops are wrong")


def _compare_op(bench: Bench, found: Found, op: Any, arrays: Any) -> bool:
    """Whether two runs of an op have different bits; AssertionError where it differs from NumPy."""
    given = [run_with(op, arrays, bench.device.xp, bench.put, bench.device.fetch) for _ in range(2)]
    narrow = any(array.dtype == np.float32 for array in arrays)
    varies = False
    for first, second, expected in zip(*given, whole(op, arrays), strict=True):
        error = deviation(first, expected)
        found["worst"] = max(found["worst"], error)
        require(error <= (1e-5 if narrow else 1e-10), f"is off by {error:.1e}")
        varies |= first.tobytes() != second.tobytes()
    return varies


@check(30)
def products(bench: Bench, found: Found) -> None:
    """cuBLAS in every layout and dtype against float64; repeated products have the same bits."""
    draw = np.random.default_rng(0)
    with bench.on_stream():
        for dtype, limit in LIMITS.items():
            for turned in range(4):
                a, b = (draw.standard_normal((3, 65, 65)).astype(dtype) for _ in range(2))
                expected = (a.swapaxes(1, 2) if turned & 1 else a).astype("float64") @ (
                    b.swapaxes(1, 2) if turned & 2 else b
                )
                left, right, out = bench.put(a), bench.put(b), bench.put(np.zeros_like(a))
                left = left.swapaxes(1, 2) if turned & 1 else left
                right = right.swapaxes(1, 2) if turned & 2 else right
                bits = set()
                for _ in range(20):
                    bench.device.xp.matmul(left, right, out)
                    bits.add(bench.device.fetch(out).tobytes())
                error = deviation(bench.device.fetch(out), expected)
                found[dtype] = max(found.get(dtype, 0.0), error)
                require(error <= limit, f"{dtype}, layout {turned}: off by {error:.1e}")
                require(len(bits) == 1, f"{dtype}, layout {turned}: {len(bits)} results")


@check(40)
def steady(bench: Bench, found: Found) -> None:
    """Which kernels still allocate or wait for the GPU once they have run before."""
    from op_examples import EXAMPLES

    import mpiflow.ops  # noqa: F401

    found |= {"quiet": 0, "not": {}}
    with bench.on_stream():
        for name, examples in EXAMPLES.items():
            op, arrays = examples[0]
            try:
                run_with(op, arrays, bench.device.xp, bench.put, bench.device.fetch)
                _strictly(bench, op, arrays)
                found["quiet"] += 1
            except Exception as error:
                found["not"][name] = f"{type(error).__name__}: {error}"[:100]


def _strictly(bench: Bench, op: Any, arrays: Any) -> None:
    """Make the call of an op with everything forbidden that a steady step must not do."""

    class Strict:
        def bind(self, *args: Any) -> Callable[[], None]:
            call = op.bind(*args)

            def run() -> None:
                with bench.device.driver.strict():
                    call()

            return run

        def __getattr__(self, name: str) -> Any:
            return getattr(op, name)

    run_with(Strict(), arrays, bench.device.xp, bench.put, bench.device.fetch)


@check(30)
def nccl(bench: Bench, found: Found) -> None:
    """All that NCCL is asked for, on a communicator of one rank; two on one GPU it may refuse."""
    from mpiflow.exec.local import LocalWorld
    from mpiflow.exec.nccl import NcclGroup

    transport, driver = LocalWorld(1).transports[0], bench.device.driver
    group = NcclGroup(transport, driver, (0,), "check")
    values = np.arange(1000, dtype="float32")
    with bench.on_stream():
        send, receive = bench.put(values), bench.put(np.zeros_like(values))
        for start in (
            group.bind_all_reduce(send),
            group.bind_all_gather(send, receive, (1000,)),
            group.bind_reduce_scatter(send, receive, (1000,)),
            group.bind_all_to_all(send, (1000,), receive, (1000,)),
        ):
            start().wait()
        came = bench.device.fetch(receive)
    require(np.array_equal(came, values), "what came is not what was sent")
    group.check()
    group.free()
    found["collectives"] = 4


@check(30)
def overlap(bench: Bench, found: Found) -> None:
    """Copies beside products: the time of both together over the sum of their times alone."""
    driver, size = bench.device.driver, 64 if bench.dry else 8192
    host = bench.device.allocate(4 * size * size, "pinned").view("float32")
    target = bench.put(np.zeros(size * size, "float32"))
    a, out = (bench.put(np.zeros((size, size), "float32")) for _ in range(2))
    kernels, copies = driver.stream(0), driver.stream(-1)

    def multiply() -> None:
        with driver.on(kernels):
            for _ in range(4):
                bench.device.xp.matmul(a, a, out)

    def copy() -> None:
        with driver.on(copies):
            for _ in range(4):
                driver.copy(target, host)

    def both() -> None:
        multiply()
        copy()

    products, moved, together = (_seconds(bench, work) for work in (multiply, copy, both))
    hidden = (products + moved - together) / min(products, moved)
    gb = 4 * host.nbytes / moved / 1e9
    found |= {"products s": products, "copies s": moved, "both s": together, "hidden": hidden,
              "pinned GB/s": gb}  # fmt: skip


def _seconds(bench: Bench, work: Callable[[], None], repeat: int = 5) -> float:
    """The median time of work on the device, the first not counted."""
    measured = []
    empty = bench.put(np.zeros(1, "float32"))
    for _ in range(repeat + 1):
        bench.device.fetch(empty)  # waits for all
        began = time.perf_counter()
        work()
        bench.device.fetch(empty)
        measured.append(time.perf_counter() - began)
    return statistics.median(measured[1:])


@check(40)
def speed(bench: Bench, found: Found) -> None:
    """TFLOP/s of square products, beside PyTorch's where it is there, in turn."""
    torch = None
    try:
        import torch as found_torch

        torch = found_torch if found_torch.cuda.is_available() else None
    except ImportError:
        found["torch"] = "is not installed"
    for size in (64,) if bench.dry else SIZES:
        for dtype in [name for name in LIMITS if name != "float64"]:
            a = bench.put(np.ones((size, size), dtype))
            out = bench.put(np.ones((size, size), dtype))
            with bench.on_stream():
                ours = _seconds(bench, lambda a=a, out=out: bench.device.xp.matmul(a, a, out))
            row = {"ours": 2 * size**3 / ours / 1e12}
            if torch is not None:
                x = torch.ones((size, size), dtype=getattr(torch, dtype), device="cuda")
                y = torch.empty_like(x)

                def theirs(x: Any = x, y: Any = y) -> None:
                    torch.matmul(x, x, out=y)
                    torch.cuda.synchronize()

                row["torch"] = 2 * size**3 / _seconds(bench, theirs) / 1e12
            found[f"{size} {dtype}"] = row


def _mpiexec() -> str:
    """The launcher of the MPI beside this Python, or of the path; "" where there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec") or ""


def _run(*command: str) -> None:
    """Run a command; AssertionError with the end of what it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    printed = (done.stdout + done.stderr)[-600:]
    require(done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}: {printed}")


def _train(
    bench: Bench, job: str, ranks: int, device: str, *more: str
) -> tuple[list[float], float]:
    """The losses of a job's steps, and the median seconds of one; in processes of their own."""
    file, settings = TRAINED[job]
    steps = DRY_STEPS if bench.dry else STEPS
    settings = (*settings, *(DRY.get(job, ()) if bench.dry else ()))
    name = f"{job}-{device}-{ranks}-".replace(" ", "-")
    out = Path(tempfile.mkdtemp(dir=bench.folder, prefix=name))
    launch = [_mpiexec(), "-n", str(ranks)] if ranks > 1 else []
    program = [str(ROOT / "tests/stand_in_run.py")] if bench.dry else ["-m", "mpiflow"]
    _run(
        *launch, sys.executable, *program, "run", str(ROOT / file), "--device", device,
        "--data", str(bench.folder), "--out", str(out), "--steps", str(steps), *more,
        *(part for setting in settings for part in ("--set", setting)),
    )  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    done = [row for row in rows if "loss" in row and "seconds" in row]
    return [row["loss"] for row in done], statistics.median(row["seconds"] for row in done)


def _compare(ours: list[float], theirs: list[float]) -> float:
    """How far losses are apart at most, relatively, over the first half of the steps."""
    pairs = list(zip(ours, theirs, strict=True))
    return max(abs(a - b) / abs(b) for a, b in pairs[: len(pairs) // 2])


@check(150)
def training(bench: Bench, found: Found) -> None:
    """Jobs on the GPU have the losses that they have on the CPU."""
    wrong = []
    for job in TRAINED:
        if job == "digits" and importlib.util.find_spec("sklearn") is None:
            found[job] = "left out: its data comes with scikit-learn, which is not installed"
            continue
        if "bfloat16" in job and "bfloat16" not in LIMITS:
            found[job] = "left out: ml_dtypes is not installed"
            continue
        try:
            if job == "digits":
                folder = str(bench.folder / job)
                _run(sys.executable, str(ROOT / "examples/pack_digits.py"), "--out", folder)
            host, slow = _train(bench, job, 1, "cpu")
            gpu, fast = _train(bench, job, 1, "cuda")
            apart = _compare(gpu, host)
            found[job] = {"apart": apart, "cpu s": slow, "cuda s": fast}
            require(apart < APART.get(job, 1e-3), f"losses are {apart:.1e} apart")
        except Exception as error:
            wrong.append(f"{job}: {error}")
    require(not wrong, "; ".join(wrong))


@check(100)
def two_ranks(bench: Bench, found: Found) -> None:
    """Two ranks that share the GPU, staged through MPI, have the losses of one."""
    if not _mpiexec():
        found["left out"] = "there is no mpiexec"
        return
    one, _ = _train(bench, "gpt", 1, "cuda")
    two, seconds = _train(bench, "gpt", 2, "cuda", "--route", "staged", "--share-gpus")
    apart = _compare(two, one)
    found["gpt"] = {"apart": apart, "s": seconds}
    require(apart < 1e-3, f"losses are {apart:.1e} apart")


def run_check(bench: Bench, name: str, file: Path, seconds: float = 600) -> bool:
    """One check under its cap, and that of all; whether it passed.

    Prints its line, and appends it to the file.
    """
    most, function = CHECKS[name]
    most = min(most, int(seconds))

    def end(*_: object) -> None:
        raise Overdue(f"took more than {most} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(most)
    began = time.perf_counter()
    found: Found = {}
    row: dict[str, Any] = {"check": name, "passed": True, "found": found}
    try:
        function(bench, found)
    except (Exception, Overdue) as error:
        row["passed"], row["error"] = False, f"{type(error).__name__}: {error}"
        row["where"] = traceback.format_exc().splitlines()[-3:]
    finally:
        signal.alarm(0)
    row["seconds"] = round(time.perf_counter() - began, 2)
    with file.open("a") as out:
        out.write(json.dumps(row, default=str) + "\n")
    mark = "ok    " if row["passed"] else "FAILED"
    error = f"{row['error']}; found " if not row["passed"] else ""
    print(f"{mark} {name:12} {row['seconds']:7.1f} s  {error}{found}", flush=True)
    return bool(row["passed"])


def open_bench(dry: bool, folder: Path) -> Bench:
    """The GPU, or its stand-in."""
    if dry:
        from gpu_stand_in import StandIn

        return Bench(CudaDevice(StandIn()), True, folder)
    from mpiflow.exec import cuda

    driver = cuda.load()
    driver.use(0)
    return Bench(CudaDevice(driver), False, folder)


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    parser.add_argument("--budget", type=float, default=470, help="seconds in all")
    parser.add_argument("--only", default="", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out.resolve()
    try:
        bench = open_bench(options.dry_run, folder)
    except MpiflowError as error:
        print(f"gpu_check: {error}")
        return 1
    names = options.only.split(",") if options.only else list(CHECKS)
    began, passed = time.perf_counter(), []
    for name in names:
        left = options.budget - (time.perf_counter() - began)
        if left < LEAST_SECONDS:
            print(f"left   {name:12} {max(left, 0):7.1f} s are left of {options.budget:.0f}")
            continue
        passed.append(run_check(bench, name, folder / "gpu.jsonl", left))
    print(f"{sum(passed)} of {len(names)} checks passed; {folder / 'gpu.jsonl'}")
    return 0 if all(passed) and len(passed) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
