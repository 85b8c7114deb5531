"""The digits program on declared fields: it is planned without a file."""

import mpiflow as mf
from mpiflow import nn

FIELDS = {"image": ((64,), "uint8"), "label": ((), "int64")}


def job(batch: int = 128, width: int = 256, lr: float = 0.1, epochs: int = 20) -> mf.Job:
    train = mf.Dataset(
        "digits/train-*.h5", batch=batch, shuffle=True, seed=0, fields=FIELDS, rows=1437
    )
    test = mf.Dataset("digits/test-*.h5", batch=batch, fields=FIELDS, rows=360)

    def model(batch):
        x = mf.cast(batch["image"], "float32") / 16
        x = mf.relu(nn.Dense(width, name="fc1")(x))
        logits = nn.Dense(10, name="out")(x)
        return {
            "loss": mf.mean(mf.cross_entropy(logits, batch["label"])),
            "accuracy": mf.mean(mf.equal(mf.argmax(logits), batch["label"])),
        }

    return mf.Job(
        "digits",
        model,
        train=train,
        evaluate=test,
        epochs=epochs,
        optimizer=mf.SGD(lr=lr, momentum=0.9),
        save=mf.Every(epochs=1),
    )
