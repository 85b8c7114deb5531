"""Recognition of faces with a margin. mpiexec -n 2 mpiflow run examples/faces.py

The last layer has a row for each identity, which an axis `model` of the mesh splits:
mpiflow plan examples/faces.py --mesh model=64 --set classes=1000000 --set batch=1024
"""

from functools import partial

import pack_faces

import mpiflow as mf
from mpiflow.models.faces import Faces
from mpiflow.models.resnet import ResNet

MANY = 10_000
"""From so many identities on there are no generated ones: such a job is planned, not run here."""


def job(
    classes: int = 64,
    margin: str = "arc",
    rows: int = 0,
    batch: int = 64,
    lr: float = 0.05,
    warmup: int = 60,
    epochs: int = 4,
    seed: int = 0,
    precision: str = "float32",
    dtype: str = "float32",
) -> mf.Job:
    """`margin`: arc or cos. `rows`: how many images there are, to plan without their files."""
    folder = pack_faces.folder_of(classes)
    small = classes < MANY
    shape = (1, pack_faces.SIZE, pack_faces.SIZE) if small else (3, 112, 112)
    fields = {"image": (shape, "uint8"), "label": ((), "int32")}
    if small:
        backbone = ResNet((1, 1, 1, 1), width=8, small=True)
        faces = Faces(backbone, classes, 64, margin, by=0.3, scale=16.0, axis="model")
        make = partial(pack_faces.generate, classes=classes)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        faces = Faces(ResNet((3, 4, 6, 3), True), classes, 512, margin, axis="model")
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 50 * classes)

    def model(batch):
        image = (mf.cast(batch["image"], dtype) - 128.0) / 64
        cosines = faces.cosines(faces(image))
        return {
            "loss": faces.loss(cosines, batch["label"]),
            "accuracy": mf.mean(mf.equal(mf.argmax(cosines), batch["label"])),
        }

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
