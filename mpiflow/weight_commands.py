"""What `mpiflow predict`, `checkpoint export` and `import` do; a docstring is the help.

As in `commands`, each imports what it needs when it runs.
"""

from __future__ import annotations

import shlex
import signal
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from mpiflow.errors import UsageError
from mpiflow.version import __version__

if TYPE_CHECKING:
    from mpiflow.io.weights.names import NameMap


def predict(options: Namespace) -> None:
    """Run a model over a data set, and write what it gives for each row to an HDF5 file.

    The model's outputs that have a value for each row are written, in the order of the rows.
    Start it alone, or under mpiexec or srun with as many ranks as you like.
    """
    out = Path(options.output)
    if out.suffix not in (".h5", ".hdf5"):
        raise UsageError(f"-o {out}: predictions are written to HDF5; name a .h5 file")
    from mpiflow.commands import check_stall
    from mpiflow.exec.failure import guard
    from mpiflow.exec.launch import connect

    check_stall(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is kept of it; say so
    transport = connect()
    with guard(transport) as failure:
        from mpiflow.commands import open_for
        from mpiflow.jobfile import load_ops
        from mpiflow.plan import store
        from mpiflow.plan.verify_ops import check_user_ops
        from mpiflow.predict import Options
        from mpiflow.predict import run as predict

        transport.check_same("mpiflow version", __version__)
        text = transport.on_root(lambda: _prediction_text(options, transport.size))
        made = store.loads(text.encode(), version=__version__)
        if made.ops and transport.rank:
            load_ops([options.job.partition(":")[0]])
        check_user_ops(made)
        device = open_for(made, options, transport)
        data = Path(options.data)
        chosen = Options(data, out, options.overwrite, options.stall)
        written = predict(made, transport, failure, chosen, device)
    if transport.rank == 0:
        for note in made.notes:
            print(note)
        for name, (dtype, shape) in written.items():
            print(f"{out}: {name} {dtype} {tuple(shape)}")


def _prediction_text(options: Namespace, ranks: int) -> str:
    """The plan of the predictions, as a file would hold it. Rank 0 only."""
    from mpiflow.jobfile import load_job
    from mpiflow.plan import store
    from mpiflow.planning import choose_mesh
    from mpiflow.predict import Request, prediction_plan

    job, folder = load_job(options.job, options.set)
    outputs = tuple(options.outputs.split(",")) if options.outputs else ()
    request = Request(
        options.checkpoint, Path(options.data), options.dataset, outputs, options.names
    )
    mesh = choose_mesh(ranks, options.mesh)
    plan = prediction_plan(
        job, folder, mesh, request, device=options.device or "cpu", route=options.route
    )
    return store.dumps(plan).decode()


def checkpoint_export(options: Namespace) -> None:
    """Write the weights of a run or a checkpoint to a .safetensors or .npz file.

    One variable is in memory at a time. Names are ours, or those of a map: a .toml or .json file,
    torchvision-resnet, hf-bert:heads=12, hf-gpt2:heads=12, hf-llama:heads=64,kv_heads=8.
    """
    from mpiflow.io.weights.builtin import name_map
    from mpiflow.io.weights.export import export
    from mpiflow.io.weights.source import find_checkpoint
    from mpiflow.plan.text import size_text

    checkpoint, names = find_checkpoint(Path(options.path)), name_map(options.names)
    _check_heads(checkpoint.path, names)
    done = export(
        checkpoint,
        Path(options.output),
        names,
        average=options.average,
        everything=options.all,
    )
    if options.json:
        options.answer = {
            "file": options.output, "checkpoint": str(checkpoint.path), "tensors": done.tensors,
            "bytes": done.nbytes, "left_out": list(done.left_out),
        }  # fmt: skip
        return
    print(f"{options.output}: {done.tensors} tensors, {size_text(done.nbytes)}, of step"
          f" {checkpoint.step} in {checkpoint.path}")  # fmt: skip
    if done.left_out:
        print(f"left out what the optimizer keeps, {len(done.left_out)} variables: --all takes it")


def _check_heads(checkpoint: Path, names: NameMap) -> None:
    """Compare with the plan of the run, where that is there."""
    from mpiflow.plan import store
    from mpiflow.runfolder import PLAN
    from mpiflow.weights import check_heads

    plan = checkpoint.parent.parent / PLAN
    if names.heads and plan.exists():
        check_heads(store.load(plan), names)


def checkpoint_import(options: Namespace) -> None:
    """Make the checkpoint of a run that begins with weights of others.

    `mpiflow run FILE.py --out FOLDER` goes on from it, and `mpiflow predict` can use it. FILE.py
    is the job; the weights are .safetensors, .npz, or a run. What they do not fill, such as what
    the optimizer keeps, begins as in a new run.
    """
    from mpiflow.job import Weights
    from mpiflow.jobfile import load_job
    from mpiflow.planning import choose_mesh, make_plan
    from mpiflow.weights import import_weights

    job, folder = load_job(options.job, options.set)
    plan = make_plan(job, folder, choose_mesh(1, None), Path(options.data))
    out = Path(options.output) if options.output else Path("run") / job.name
    without, ignore = tuple(options.without), tuple(options.ignore)
    weights = Weights(options.weights, options.names, without, ignore)
    path, remarks = import_weights(plan, weights, out, Path())
    if options.json:
        options.answer = {"checkpoint": str(path), "notes": remarks}
        return
    for remark in remarks:
        print(remark)
    print(f"{path}: step 0 of {job.name}; go on with"
          f" mpiflow run {shlex.quote(options.job)} --out {shlex.quote(str(out))}")  # fmt: skip
