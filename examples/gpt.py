"""A decoder transformer that predicts the next token. mpiexec -n 2 mpiflow run examples/gpt.py

A text of your own, such as the Bible (Debian's bible-kjv: bible gen1:1-rev22:21 > kjv.txt), is
packed and read by
mpiflow data pack text kjv.txt text/gpt-512x33 --length 33 --vocabulary 512 --test 0.1
mpiexec -n 2 mpiflow run examples/gpt.py --set vocabulary=512

mpiflow plan examples/gpt.py --ranks 64 --set size=small      GPT-2's sizes, and 70b
"""

from functools import partial

import generated

import mpiflow as mf
from mpiflow.io.pack.tokens import token_dtype
from mpiflow.models.gpt import gpt


def job(
    size: str = "tiny",
    vocabulary: int = 0,
    rows: int = 0,
    batch: int = 64,
    lr: float = 3e-3,
    warmup: int = 50,
    epochs: int = 10,
    seed: int = 0,
    precision: str = "float32",
) -> mf.Job:
    """`rows`: how many there are, to plan a full size where the files are not (default 10^6)."""
    decoder = gpt(size, vocabulary)
    length = decoder.context + 1
    fields = {"tokens": ((length,), token_dtype(decoder.vocabulary).name)}
    folder = f"text/gpt-{decoder.vocabulary}x{length}"
    if size == "tiny":
        draw = partial(generated.token_rows, vocabulary=decoder.vocabulary, length=length)
        make = partial(generated.write, folder=folder, draw=draw, rows=4000)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 10**6)

    def model(batch):
        return {"loss": decoder.loss(batch["tokens"])}

    return mf.Job(
        f"gpt-{size}",
        model,
        train=data(f"{folder}/train-*.h5", shuffle=True, seed=seed),
        evaluate=data(f"{folder}/test-*.h5") if size == "tiny" else None,
        epochs=epochs,
        optimizer=mf.AdamW(
            lr=mf.Cosine(lr, warmup=warmup),
            betas=(0.9, 0.95),
            weight_decay=0.1,
            clip=1.0,
            groups=(mf.NO_DECAY,),
        ),
        save=mf.Every(epochs=1),
        seed=seed,
        precision=precision,
    )
