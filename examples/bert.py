"""BERT's training: masked tokens, next sentence. mpiexec -n 2 mpiflow run examples/bert.py

mpiflow plan examples/bert.py --ranks 64 --set size=large      the published sizes: base, large
"""

from functools import partial

import pack_text

import mpiflow as mf
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
        "tokens": ((length,), pack_text.dtype_of(encoder.vocabulary)),
        "segment": ((length,), "uint8"),
        "label": ((length,), "int32"),
        "next": ((), "uint8"),
    }
    folder = pack_text.folder_of("bert", encoder.vocabulary, length)
    if size == "tiny":
        make = partial(
            pack_text.generate, model="bert", vocabulary=encoder.vocabulary, length=length
        )
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 10**6)

    def model(batch):
        masked, order = encoder.losses(
            batch["tokens"], batch["segment"], batch["label"], batch["next"]
        )
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
