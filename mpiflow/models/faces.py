"""Recognition of faces: features on a sphere, classes apart by a margin.

    backbone -> Dense, BatchNorm -> normalise -> products with normalised class weights -> margin

The last layer has a row for each identity, up to millions; `axis` splits its rows, and the loss
then moves a few numbers an image (as in Deng et al. 2019, section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import mpiflow as mf
from mpiflow import nn
from mpiflow.graph.graph import Hint
from mpiflow.models.resnet import ResNet
from mpiflow.ops import linear_transposed


@dataclass(frozen=True, slots=True)
class Faces:
    """Called on images (n, c, height, width) of floats, it gives features (n, width) of length 1.

    `margin` is "arc" (Deng et al. 2019) or "cos" (Wang et al. 2018).
    """

    backbone: ResNet
    classes: int
    width: int = 512
    margin: str = "arc"
    by: float = 0.5
    scale: float = 64.0
    axis: str | None = None

    def __call__(self, x: mf.Tensor) -> mf.Tensor:
        """The features (n, width)."""
        x = nn.Dense(self.width, bias=False, name="features")(self.backbone.features(x))
        return mf.normalise(nn.BatchNorm(name="features_norm")(x))

    def cosines(self, features: mf.Tensor) -> mf.Tensor:
        """The cosine of each image's angle to each class, (n, classes)."""
        sbp: Hint | None = {self.axis: mf.S(0)} if self.axis else None
        weight = nn.variable(
            "classes.weight", (self.classes, self.width), nn.normal(0.01),
            dtype=features.dtype, sbp=sbp,
        )  # fmt: skip
        return linear_transposed(features, mf.normalise(weight))

    def loss(self, cosines: mf.Tensor, label: mf.Tensor) -> mf.Tensor:
        """The mean cross entropy with the margin."""
        margin = {"arc": mf.arc_margin, "cos": mf.cos_margin}[self.margin]
        logits = margin(cosines, label, margin=self.by, scale_by=self.scale)
        return mf.mean(mf.cross_entropy(logits, label))
