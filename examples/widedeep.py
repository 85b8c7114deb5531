"""Predicts clicks from ids and numbers. mpiexec -n 2 mpiflow run examples/widedeep.py

python examples/widedeep.py run/widedeep/metrics.jsonl     the AUC of each evaluation of that run
mpiflow plan examples/widedeep.py --ranks 256 --set table=1000000000
"""

import json
import sys
from functools import partial
from pathlib import Path

import generated

import mpiflow as mf
from mpiflow.models.widedeep import WideDeep, auc, histograms

LARGE = 1_000_000
"""A table from so many rows on has no generated log: such a job is planned, not run here."""


def job(
    table: int = 200,
    width: int = 8,
    rows: int = 0,
    batch: int = 256,
    lr: float = 0.01,
    warmup: int = 20,
    epochs: int = 4,
    seed: int = 0,
    precision: str = "float32",
) -> mf.Job:
    """`table`: rows of the largest table. `rows`: of the log, to plan without its files."""
    tables = generated.tables_of(table)
    ids = [f"id{i}" for i in range(len(tables))]
    fields = {name: ((), "int64") for name in ids}
    fields |= {"numbers": ((generated.NUMBERS,), "float32"), "click": ((), "uint8")}
    folder = f"clicks/{table}"
    if table < LARGE:
        draw = partial(generated.clicks, table=table)
        make = partial(generated.write, folder=folder, draw=draw, rows=40_000)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 10**9)
    network = WideDeep(tables, width, (64, 32))

    def model(batch):
        logits = network([batch[name] for name in ids], batch["numbers"])
        click = batch["click"]
        outputs = {"loss": mf.mean(mf.binary_cross_entropy(logits, click))}
        if not mf.is_training():
            outputs |= histograms(logits, click)
        return outputs

    return mf.Job(
        "widedeep",
        model,
        train=data(f"{folder}/train-*.h5", shuffle=True, seed=seed),
        evaluate=data(f"{folder}/test-*.h5") if table < LARGE else None,
        epochs=epochs,
        optimizer=mf.Adam(lr=mf.Cosine(lr, warmup=warmup)),
        seed=seed,
        precision=precision,
    )


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        row = json.loads(line)
        if "evaluation" in row:
            print(f"step {row['step']}: loss {row['loss']:.4f}, AUC {auc(row):.4f}")


if __name__ == "__main__":
    main()
