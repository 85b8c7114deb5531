"""BERT's training: masked tokens, next sentence. mpiexec -n 2 mpiflow run examples/bert.py

A text of your own, such as the Bible (Debian's bible-kjv: bible gen1:1-rev22:21 > kjv.txt), is
packed and read by
mpiflow data pack text kjv.txt text/bert-512x33 --length 33 --vocabulary 512 --test 0.1 --pairs
mpiexec -n 2 mpiflow run examples/bert.py --set vocabulary=512

mpiflow plan examples/bert.py --ranks 64 --set size=large      the published sizes: base, large
"""

from functools import partial

import generated

import mpiflow as mf
from mpiflow.io.pack.pairs import hidden_count
from mpiflow.io.pack.tokens import token_dtype
from mpiflow.models.bert import bert


def job(
    size: str = "tiny",
    vocabulary: int = 0,
    rows: int = 0,
    batch: int = 64,
    lr: float = 2e-3,
    warmup: int = 50,
    epochs: int = 20,
    seed: int = 0,
    precision: str = "float32",
) -> mf.Job:
    """`rows`: how many there are, to plan a full size where the files are not (default 10^6)."""
    encoder = bert(size, vocabulary)
    length = encoder.positions
    fields = {
        "tokens": ((length,), token_dtype(encoder.vocabulary).name),
        "segment": ((length,), "uint8"),
        "positions": ((hidden_count(length),), "int32"),
        "label": ((hidden_count(length),), "int32"),
        "next": ((), "uint8"),
    }
    folder = f"text/bert-{encoder.vocabulary}x{length}"
    if size == "tiny":
        draw = partial(generated.pairs, vocabulary=encoder.vocabulary, length=length)
        make = partial(generated.write, folder=folder, draw=draw, rows=4000)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 10**6)

    def model(batch):
        fields = (batch[name] for name in ("tokens", "segment", "label", "next", "positions"))
        masked, order = encoder.losses(*fields)
        return {"loss": masked + order, "masked": masked, "next": order}

    return mf.Job(
        f"bert-{size}",
        model,
        train=data(f"{folder}/train-*.h5", shuffle=True, seed=seed),
        evaluate=data(f"{folder}/test-*.h5") if size == "tiny" else None,
        epochs=epochs,
        optimizer=mf.AdamW(
            lr=mf.LinearDecay(lr, warmup=warmup),
            weight_decay=0.01,
            clip=1.0,
            groups=(mf.NO_DECAY,),
        ),
        seed=seed,
        precision=precision,
    )
