"""What `mpiflow calibrate` does; its docstring is the help."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from pathlib import Path

from mpiflow.errors import MpiflowError, UsageError
from mpiflow.version import __version__


def calibrate(options: Namespace) -> None:
    """Measure this machine, and write a machine file that plans are priced from.

    Start it under mpiexec or srun on as many ranks of a node as jobs will have there, on two
    nodes if jobs will have several: kernels, collectives by size and reading are measured on all
    ranks at once. Takes about a minute, --quick a quarter of that.
    """
    out = Path(options.output)
    if out.suffix != ".toml":
        raise UsageError(f"-o {out}: a machine file ends in .toml")
    if not out.parent.is_dir():
        raise UsageError(f"-o {out}: there is no folder {out.parent}")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UsageError(f"-o {out}: it cannot be written; name another file")
    if options.data is not None and not Path(options.data).is_dir():
        raise UsageError(
            f"--data {options.data}: no such folder; name one on the storage to measure"
        )
    from mpiflow.exec.failure import guard
    from mpiflow.exec.launch import connect

    transport = connect()
    with guard(transport):
        from mpiflow.calibration.measure import Options, table
        from mpiflow.calibration.measure import calibrate as measure

        transport.check_same("mpiflow version", __version__)
        data = Path(options.data) if options.data is not None else None
        report = measure(transport, Options(options.name or out.stem, options.quick, data))
        if report is None:
            return
        try:
            out.write_text(report.text)
        except OSError as error:
            raise MpiflowError(f"-o {out}: it cannot be written: {error.strerror}") from error
        print("\n".join(table(report.rows)))
        for remark in report.remarks:
            print(f"note: {remark}")
        print(f"wrote {out}; plan with --cluster {shlex.quote(str(out))}")
