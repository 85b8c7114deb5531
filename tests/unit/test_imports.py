"""Who may import whom: the arrows of the package point down, and `import mpiflow` needs NumPy only.

Every import counts, also those inside functions and those for annotations.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpiflow"
# Leaves, which import nothing of mpiflow and which every file may import.
LEAVES = ("mpiflow.errors", "mpiflow.garbage", "mpiflow.threads", "mpiflow.version")
MODEL = ("mpiflow.graph", "mpiflow.ops", "mpiflow.nn", "mpiflow.optim", "mpiflow.job")

# Folder or module -> what it may import besides itself and the leaves.
ALLOWED = {
    "errors": (),
    "garbage": (),
    "threads": (),
    "version": (),
    "graph": (),
    "ops": ("mpiflow.graph",),
    "plan": ("mpiflow.graph",),
    # What a user's file is made of; the compiler begins with it.
    "nn": MODEL,
    "optim": MODEL,
    "job": MODEL,
    "compiler": ("mpiflow.graph", "mpiflow.ops", "mpiflow.plan", "mpiflow.job", "mpiflow.optim"),
    "exec": ("mpiflow.graph", "mpiflow.ops", "mpiflow.plan"),
    "io": ("mpiflow.graph.sbp", "mpiflow.graph.philox", "mpiflow.plan"),
}
# Library -> the one file that imports it.
ONE_FILE = {
    "mpi4py": "exec/mpi.py",
    "h5py": "io/hdf5.py",
    "cupy": "exec/cuda.py",
    "scipy": "compiler/highs.py",
    "PIL": "io/pack/images.py",
    "tokenizers": "io/pack/tokenizer.py",
}
PROGRAM = "mpiflow.cli"

MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(text, package=""):
    """(line, dotted name) of everything that the source imports; `package` is its own folder."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def within(name, prefixes):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def broken_rules(path, text):
    """What the source of mpiflow/`path` imports against the rules, one line each."""
    relative = Path(path)
    package = ".".join(["mpiflow", *relative.parent.parts])
    part = relative.parts[0].removesuffix(".py")
    leaves = () if f"mpiflow.{part}" in LEAVES else LEAVES
    own = (f"mpiflow.{part}", *leaves, *ALLOWED.get(part, ()))
    problems = []
    for line, name in imports(text, package):
        library = name.split(".")[0]
        if part in ALLOWED and library == "mpiflow" and not within(name, own):
            problems.append(f"mpiflow/{path}:{line}: {part} must not import {name}")
        if path != ONE_FILE.get(library, path):
            problems.append(f"mpiflow/{path}:{line}: only {ONE_FILE[library]} imports {library}")
        if within(name, (PROGRAM,)) and path not in ("__main__.py", "cli.py"):
            problems.append(f"mpiflow/{path}:{line}: nothing imports the command line")
    return problems


@pytest.mark.parametrize("path", [str(path.relative_to(PACKAGE)) for path in MODULES])
def test_the_arrows_point_down(path):
    assert broken_rules(path, (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("graph/tensor.py", "from mpiflow.ops import dense"),
        ("plan/verify.py", "from mpiflow import ops"),
        ("compiler/lower.py", "import mpiflow.exec.session"),
        ("exec/session.py", "def late():\n    from mpiflow.compiler import lower"),
        ("exec/session.py", "from mpiflow.io import dataset"),
        ("io/dataset.py", "from mpiflow.graph import tensor"),
        ("io/dataset.py", "from ..exec import session"),
        ("io/dataset.py", "from .. import job"),
        ("io/checkpoint.py", "import h5py"),
        ("exec/session.py", "from mpi4py import MPI"),
        ("train.py", "from mpiflow.cli import main"),
        ("threads.py", "from mpiflow.errors import UsageError"),
        ("job.py", "from mpiflow.compiler import lower"),
        ("exec/session.py", "from mpiflow.job import Job"),
    ],
)
def test_an_arrow_that_points_up_is_found(path, text):
    assert len(broken_rules(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("io/dataset.py", "from . import hdf5\nfrom mpiflow.graph.sbp import span"),
        ("graph/sbp.py", "from mpiflow.errors import SbpError"),
        ("compiler/trace.py", "from mpiflow.job import Job"),
        ("exec/launch.py", "from mpiflow.threads import local_ranks"),
        ("exec/mpi.py", "from mpi4py import MPI"),
        ("__main__.py", "from mpiflow.cli import main"),
        ("train.py", "from mpiflow.exec import session\nfrom mpiflow.io import dataset"),
    ],
)
def test_an_arrow_that_points_down_is_accepted(path, text):
    assert broken_rules(path, text) == []


BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"mpi4py", "h5py", "cupy", "scipy", "sklearn"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Absent())
import mpiflow
"""


def test_import_mpiflow_needs_numpy_only():
    command = [sys.executable, "-W", "error", "-c", BLOCKED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
