"""Plain convolutional networks in torchvision's form: AlexNet (2014 form), VGG (2014)."""

from __future__ import annotations

from dataclasses import dataclass

import mpiflow as mf
from mpiflow import nn

Layer = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ConvNet:
    """Convolutions with relu and max pools, then two hidden layers with dropout, then logits.

    Each group of `groups` is convolutions (channels, kernel, stride, padding) before a pool of
    (window, stride). Called on images (n, c, height, width) it gives (n, classes).
    """

    groups: tuple[tuple[Layer, ...], ...]
    pool: tuple[int, int]
    hidden: int = 4096
    classes: int = 1000
    dropout: float = 0.5

    def __call__(self, x: mf.Tensor) -> mf.Tensor:
        """The logits (n, classes)."""
        for i, group in enumerate(self.groups):
            for j, (channels, kernel, stride, padding) in enumerate(group):
                conv = nn.Conv(
                    channels, kernel, stride=stride, padding=padding, name=f"conv{i + 1}.{j}"
                )
                x = mf.relu(conv(x))
            x = mf.max_pool(x, self.pool[0], stride=self.pool[1])
        x = mf.reshape(x, (x.shape[0], -1))
        for name in ("fc1", "fc2"):
            x = mf.relu(nn.Dense(self.hidden, name=name)(mf.dropout(x, self.dropout)))
        return nn.Dense(self.classes, name="fc3")(x)


def alexnet(classes: int = 1000) -> ConvNet:
    """AlexNet (Krizhevsky 2014) for 224 pixels."""
    groups = (
        ((64, 11, 4, 2),),
        ((192, 5, 1, 2),),
        ((384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1)),
    )
    return ConvNet(groups, (3, 2), classes=classes)


def small_alexnet(classes: int = 10) -> ConvNet:
    """AlexNet's form for images of 28 or 32 pixels, with an eighth of its width."""
    groups = (((16, 3, 1, 1),), ((32, 3, 1, 1),), ((48, 3, 1, 1), (32, 3, 1, 1), (32, 3, 1, 1)))
    return ConvNet(groups, (2, 2), hidden=128, classes=classes, dropout=0.2)


def vgg16(classes: int = 1000) -> ConvNet:
    """VGG-16 (Simonyan and Zisserman 2014) for 224 pixels, without batch norm."""
    return ConvNet(_vgg_groups((64, 128, 256, 512, 512)), (2, 2), classes=classes)


def small_vgg16(classes: int = 10) -> ConvNet:
    """VGG-16's form for images of 28 or 32 pixels: four pools, an eighth of its width."""
    groups = _vgg_groups((8, 16, 32, 64))
    return ConvNet(groups, (2, 2), hidden=128, classes=classes, dropout=0.2)


def _vgg_groups(widths: tuple[int, ...]) -> tuple[tuple[Layer, ...], ...]:
    counts = (2, 2, 3, 3, 3)
    return tuple(((w, 3, 1, 1),) * n for w, n in zip(widths, counts, strict=False))
