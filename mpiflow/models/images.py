"""Classifiers of images by name and size of the image."""

from __future__ import annotations

from mpiflow.models.choose import chosen
from mpiflow.models.convnet import ConvNet, alexnet, small_alexnet, small_vgg16, vgg16
from mpiflow.models.resnet import ResNet

SMALL = 64
"""Images with fewer pixels a side get a model's form for small images."""


def classifier(model: str, size: int, classes: int) -> ResNet | ConvNet:
    """alexnet, vgg16, resnet18, resnet34 or resnet50 for images of size x size pixels.

    The small forms have an eighth of the width (a quarter for the residual ones).
    """
    small = size < SMALL
    width = 16 if small else 64
    by_name: dict[str, ResNet | ConvNet] = {
        "alexnet": small_alexnet(classes) if small else alexnet(classes),
        "vgg16": small_vgg16(classes) if small else vgg16(classes),
        "resnet18": ResNet((2, 2, 2, 2), False, classes, width, small),
        "resnet34": ResNet((3, 4, 6, 3), False, classes, width, small),
        "resnet50": ResNet((3, 4, 6, 3), True, classes, width, small),
    }
    return chosen("model", model, by_name)
