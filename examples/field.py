"""Finds the numbers that a field follows from. mpiexec -n 2 mpiflow run examples/field.py

mpiflow plan examples/field.py --ranks 64 --set size=512 --set batch=64
"""

from functools import partial

import generated

import mpiflow as mf
from mpiflow.models.field import Field

LARGE = 64
"""From so many points a side on no fields are generated: such a job is planned, not run here."""


def job(
    size: int = 16,
    width: int = 0,
    rows: int = 0,
    batch: int = 32,
    lr: float = 3e-3,
    warmup: int = 10,
    epochs: int = 12,
    seed: int = 0,
    precision: str = "float32",
) -> mf.Job:
    """`rows`: how many volumes there are, to plan without their files (default 10^5)."""
    small = size < LARGE
    pools = min(size.bit_length() - 3, 7)  # until about four points a side are left
    network = Field(generated.CAUSES, pools, width or (8 if small else 16))
    fields = {
        "volume": ((1, size, size, size), "float32"),
        "numbers": ((generated.CAUSES,), "float32"),
    }
    folder = f"field/{size}"
    if small:
        draw = partial(generated.fields, size=size)
        make = partial(generated.write, folder=folder, draw=draw, rows=640)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 10**5)

    def model(batch):
        numbers = network(batch["volume"])
        return {
            "loss": mf.mean(mf.mse(numbers, batch["numbers"])),
            "error": mf.mean(mf.l1(numbers, batch["numbers"])),
        }

    return mf.Job(
        "field",
        model,
        train=data(f"{folder}/train-*.h5", shuffle=True, seed=seed),
        evaluate=data(f"{folder}/test-*.h5") if small else None,
        epochs=epochs,
        optimizer=mf.AdamW(lr=mf.Cosine(lr, warmup=warmup)),
        seed=seed,
        precision=precision,
    )
