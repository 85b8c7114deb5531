"""Classifiers of images. mpiexec -n 2 mpiflow run examples/images.py --set model=resnet18

Fashion-MNIST, which learns to 0.90 (Debian: apt-get install dataset-fashion-mnist), is packed by
mpiflow data pack idx /usr/share/datasets/fashion-mnist images/28x1x10

What a trained one says of each test image:
mpiexec -n 2 mpiflow predict examples/images.py --checkpoint run/images-alexnet -o logits.h5

A full size is planned without files: mpiflow plan examples/images.py --ranks 64 --set size=224
--set model=resnet50 --set channels=3 --set classes=1000

Residual networks stand --set lr=0.1 on real data. On the few generated images, of which an epoch
has 31 steps, evaluations of the first epochs are then low whatever the training loss is: the
running statistics of batch norm follow over ten steps or so, and weights change faster than that.
"""

from functools import partial

import generated

import mpiflow as mf
from mpiflow.models.images import SMALL, classifier


def job(
    model: str = "alexnet",
    size: int = 28,
    channels: int = 1,
    classes: int = 10,
    rows: int = 0,
    batch: int = 128,
    lr: float = 0.02,
    warmup: int = 100,
    epochs: int = 8,
    seed: int = 0,
    precision: str = "float32",
    dtype: str = "float32",
) -> mf.Job:
    """`model`: alexnet, vgg16, resnet18, resnet34 or resnet50, on images of size x size pixels.

    `rows`: how many images there are, to plan large ones where the files are not (default 10^6).
    """
    network = classifier(model, size, classes)
    fields = {"image": ((channels, size, size), "uint8"), "label": ((), "uint16")}
    folder = f"images/{size}x{channels}x{classes}"
    if size < SMALL:
        draw = partial(generated.images, size=size, channels=channels, classes=classes)
        make = partial(generated.write, folder=folder, draw=draw, rows=4000)
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or None, make=make)
    else:
        data = partial(mf.Dataset, batch=batch, fields=fields, rows=rows or 10**6)

    def build(batch):
        image = (mf.cast(batch["image"], dtype) - 128.0) / 64
        logits = network(image)
        return {
            "loss": mf.mean(mf.cross_entropy(logits, batch["label"])),
            "accuracy": mf.mean(mf.equal(mf.argmax(logits), batch["label"])),
            "logits": logits,
        }

    return mf.Job(
        f"images-{model}",
        build,
        train=data(f"{folder}/train-*.h5", shuffle=True, seed=seed),
        evaluate=data(f"{folder}/test-*.h5") if size < SMALL else None,
        epochs=epochs,
        optimizer=mf.SGD(
            lr=mf.Cosine(lr, warmup=warmup),
            momentum=0.9,
            weight_decay=5e-4,
            groups=(mf.NO_DECAY,),
        ),
        seed=seed,
        precision=precision,
    )
