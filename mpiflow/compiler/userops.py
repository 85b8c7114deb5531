"""Which ops of the user's own a plan uses: their names, files and digests, never their code."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mpiflow.graph.op import REGISTRY
from mpiflow.plan.records import COMPUTE, Program, UserOp


def user_ops(programs: Iterable[Program], folder: Path) -> tuple[UserOp, ...]:
    """A record of each op that is not mpiflow's, by name; files are relative to `folder`."""
    names = {t.op for program in programs for t in program.tasks if t.kind == COMPUTE}
    found = []
    for name in sorted(names):
        if source := REGISTRY[name].source:
            relative = Path(os.path.relpath(source.file, folder.resolve())).as_posix()
            file = source.file.name if relative.startswith("..") else relative
            found.append(UserOp(name, file, source.digest))
    return tuple(found)


def identity_section(ops: tuple[UserOp, ...]) -> tuple[tuple[str, str], ...]:
    """What they add to the program's identity: an op that is changed computes something else."""
    return (("ops", "\n".join(f"{op.name} {op.digest[:16]}" for op in ops)),) if ops else ()
