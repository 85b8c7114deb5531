"""Classifiers of images by name and size of the image."""

from __future__ import annotations

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
    match model:
        case "alexnet":
            return small_alexnet(classes) if small else alexnet(classes)
        case "vgg16":
            return small_vgg16(classes) if small else vgg16(classes)
        case "resnet18":
            return ResNet((2, 2, 2, 2), False, classes, width, small)
        case "resnet34":
            return ResNet((3, 4, 6, 3), False, classes, width, small)
        case "resnet50":
            return ResNet((3, 4, 6, 3), True, classes, width, small)
    raise ValueError(f"model {model!r} is none of alexnet, vgg16, resnet18, resnet34, resnet50")
