"""Another task on the weights of examples/digits.py. mpiexec -n 2 mpiflow run examples/finetune.py

Is the digit above 4? The first layer is that of the run in run/digits, and stays; a new last layer
is trained. The probabilities of every row: mpiflow predict examples/finetune.py -o out.h5
--checkpoint run/finetune
"""

import mpiflow as mf
from mpiflow import nn


def job(batch: int = 128, width: int = 256, lr: float = 0.1, epochs: int = 3) -> mf.Job:
    train = mf.Dataset("digits/train-*.h5", batch=batch, shuffle=True, seed=1)
    test = mf.Dataset("digits/test-*.h5", batch=batch)

    def model(batch):
        x = mf.cast(batch["image"], "float32") / 16
        x = mf.relu(nn.Dense(width, name="fc1")(x))
        logits = mf.reshape(nn.Dense(1, name="above")(x), (-1,))
        above = mf.greater(batch["label"], 4)
        return {
            "loss": mf.mean(mf.binary_cross_entropy(logits, above)),
            "accuracy": mf.mean(mf.equal(mf.greater(logits, 0.0), above)),
            "probability": mf.sigmoid(logits),
        }

    return mf.Job(
        "finetune",
        model,
        train=train,
        evaluate=test,
        epochs=epochs,
        optimizer=mf.SGD(lr=lr, momentum=0.9),
        init=mf.Weights("run/digits", without=("above.*",), ignore=("out.*",)),
        frozen=("fc1.*",),
    )
