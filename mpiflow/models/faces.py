"""Recognition of faces: features on a sphere, classes apart by a margin.

    backbone -> Dense, BatchNorm -> normalise -> products with normalised class weights -> margin

The last layer has a row for each identity, up to millions. Where these are many the compiler splits
them, and the loss then moves a few numbers an image (as in Deng et al. 2019, section 2.3). With
`sampled` a training step compares with some of the classes (An et al. 2021, Partial FC).
"""

from __future__ import annotations

from dataclasses import dataclass

import mpiflow as mf
from mpiflow import nn
from mpiflow.models.choose import chosen
from mpiflow.models.resnet import ResNet
from mpiflow.ops import block_count, linear_transposed, sample_rows


@dataclass(frozen=True, slots=True)
class Faces:
    """Called on images (n, c, height, width) of floats, it gives features (n, width) of length 1.

    `margin` is "arc" (Deng et al. 2019) or "cos" (Wang et al. 2018).

    `sampled` below 1 is the share of the classes that a training step compares with: those of its
    labels, and random others in each of `blocks` equal blocks (0: as many, up to 64, as the share
    allows). Only their weights are read and updated, which is the lazy form of momentum and weight
    decay. The sample is a function of seed and step and does not depend on the ranks, each of which
    holds whole blocks.
    """

    backbone: ResNet
    classes: int
    width: int = 512
    margin: str = "arc"
    by: float = 0.5
    scale: float = 64.0
    sampled: float = 1.0
    blocks: int = 0

    def __call__(self, x: mf.Tensor) -> mf.Tensor:
        """The features (n, width)."""
        x = nn.Dense(self.width, bias=False, name="features")(self.backbone.features(x))
        return mf.normalise(nn.BatchNorm(name="features_norm")(x))

    def cosines(self, features: mf.Tensor) -> mf.Tensor:
        """The cosine of each image's angle to each class, (n, classes)."""
        return linear_transposed(features, mf.normalise(self._weight(features)))

    def compared(self, features: mf.Tensor, label: mf.Tensor) -> tuple[mf.Tensor, mf.Tensor]:
        """Cosines (n, c) to classes, and in which column that of each label (n,) is.

        In training these are the sampled classes; without `sampled`, and in evaluations, all.
        """
        if self.sampled == 1 or not mf.is_training():
            return self.cosines(features), label
        blocks = self.blocks or block_count(self.classes, label.shape[0], self.sampled)
        weight = self._weight(features)
        rows, column = sample_rows(weight, label, self.sampled, blocks=blocks)
        rows = mf.normalise(mf.reshape(rows, (-1, self.width)))
        return linear_transposed(features, rows), column

    def _weight(self, features: mf.Tensor) -> mf.Tensor:
        """The class weights."""
        shape = (self.classes, self.width)
        return nn.variable("classes.weight", shape, nn.normal(0.01), dtype=features.dtype)

    def loss(self, cosines: mf.Tensor, label: mf.Tensor) -> mf.Tensor:
        """The mean cross entropy with the margin."""
        margins = {"arc": mf.arc_margin, "cos": mf.cos_margin}
        margin = chosen("margin", self.margin, margins)
        logits = margin(cosines, label, margin=self.by, scale_by=self.scale)
        return mf.mean(mf.cross_entropy(logits, label))
