"""Residual networks (He et al. 2015), in torchvision's form: a bottleneck's stride is in its 3x3.

Each stage halves the image and doubles the channels, but for the first:

    conv1  7x7 /2, pool 3x3 /2  ->  layer1  ->  layer2 /2  ->  layer3 /2  ->  layer4 /2  ->  fc
"""

from __future__ import annotations

from dataclasses import dataclass

import mpiflow as mf
from mpiflow import nn


@dataclass(frozen=True, slots=True)
class ResNet:
    """Called on images (n, c, height, width) of floats, it gives logits (n, classes).

    `small` is the form for images of 28 or 32 pixels: conv1 is 3x3 without a stride, no pool.
    """

    blocks: tuple[int, int, int, int]
    bottleneck: bool = False
    classes: int = 1000
    width: int = 64
    small: bool = False

    def __call__(self, x: mf.Tensor) -> mf.Tensor:
        """The logits (n, classes)."""
        return nn.Dense(self.classes, name="fc")(self.features(x))

    def features(self, x: mf.Tensor) -> mf.Tensor:
        """The mean of each channel at the end, (n, 8 width), or (n, 32 width) with bottlenecks."""
        kernel, stride = (3, 1) if self.small else (7, 2)
        x = mf.relu(_conv(x, self.width, kernel, stride, "conv1", "bn1"))
        if not self.small:
            x = mf.max_pool(x, 3, stride=2, padding=1)
        for stage, count in enumerate(self.blocks):
            for i in range(count):
                stride = 2 if stage and not i else 1
                x = self._block(x, self.width << stage, stride, f"layer{stage + 1}.{i}")
        return mf.global_mean_pool(x)

    def _block(self, x: mf.Tensor, width: int, stride: int, name: str) -> mf.Tensor:
        kernels: tuple[int, ...]
        widths: tuple[int, ...]
        strides: tuple[int, ...]
        if self.bottleneck:
            kernels, widths, strides = (1, 3, 1), (width, width, 4 * width), (1, stride, 1)
        else:
            kernels, widths, strides = (3, 3), (width, width), (stride, 1)
        y = x
        for i in range(len(kernels)):
            names = f"{name}.conv{i + 1}", f"{name}.bn{i + 1}"
            y = _conv(mf.relu(y) if i else y, widths[i], kernels[i], strides[i], *names)
        if x.shape != y.shape:
            names = f"{name}.downsample.conv", f"{name}.downsample.bn"
            x = _conv(x, widths[-1], 1, stride, *names)
        return mf.relu(x + y)


def _conv(x: mf.Tensor, width: int, kernel: int, stride: int, name: str, norm: str) -> mf.Tensor:
    conv = nn.Conv(width, kernel, stride=stride, padding=kernel // 2, bias=False, name=name)
    return nn.BatchNorm(name=norm)(conv(x))
