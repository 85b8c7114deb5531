"""Recognition of faces with a margin. mpiexec -n 2 mpiflow run examples/faces.py

Faces of your own, a folder of them for each identity, are packed and read by
mpiflow data pack images FOLDER faces/64 --size 28 --gray --test 0.1

The last layer has a row for each identity, which the ranks split where they are many:
mpiflow plan examples/faces.py --ranks 64 --set classes=1000000 --set batch=1024

With `sampled` a step compares with a share of the identities, which takes many of them:
mpiflow run examples/faces.py --set classes=1024 --set sampled=0.25 --set epochs=2
"""

from functools import partial

import generated

import mpiflow as mf
from mpiflow.models.faces import Faces
from mpiflow.models.resnet import ResNet

MANY = 10_000
"""From so many identities on there are no generated ones: such a job is planned, not run here."""


def job(
    classes: int = 64,
    margin: str = "arc",
    sampled: float = 1.0,
    rows: int = 0,
    batch: int = 64,
    lr: float = 0.05,
    warmup: int = 60,
    epochs: int = 4,
    seed: int = 0,
    precision: str = "float32",
    dtype: str = "float32",
) -> mf.Job:
    """`margin`: arc or cos. `rows`: how many images there are, to plan without their files.

    `sampled`: the share of identities that a training step compares with, and its accuracy is among
    these; evaluations take all.
    """
    folder = f"faces/{classes}"
    small = classes < MANY
    shape = (1, generated.FACE, generated.FACE) if small else (3, 112, 112)
    fields = {"image": (shape, "uint8"), "label": ((), "uint16" if small else "int32")}
    if small:
        backbone = ResNet((1, 1, 1, 1), width=8, small=True)
        faces = Faces(backbone, classes, 64, margin, 0.3, 16.0, sampled=sampled)
        draw = partial(generated.faces, classes=classes)
        make = partial(generated.write, folder=folder, draw=draw, rows=60 * classes)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        backbone = ResNet((3, 4, 6, 3), bottleneck=True)
        faces = Faces(backbone, classes, 512, margin, sampled=sampled)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 50 * classes)

    def model(batch):
        image = (mf.cast(batch["image"], dtype) - 128.0) / 64
        cosines, column = faces.compared(faces(image), batch["label"])
        nearest = mf.greater_equal(mf.pick(cosines, column), mf.reduce_max(cosines, -1))
        return {"loss": faces.loss(cosines, column), "accuracy": mf.mean(nearest)}

    return mf.Job(
        "faces",
        model,
        train=data(f"{folder}/train-*.h5", shuffle=True, seed=seed),
        evaluate=data(f"{folder}/test-*.h5") if small else None,
        epochs=epochs,
        optimizer=mf.SGD(lr=mf.Cosine(lr, warmup=warmup), momentum=0.9, weight_decay=5e-4),
        seed=seed,
        precision=precision,
    )
