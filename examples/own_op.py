"""An op of one's own, in the job that uses it. mpiexec -n 2 mpiflow run examples/own_op.py"""

from math import prod

import mpiflow as mf
from mpiflow import nn


@mf.op
class LeakyRelu(mf.Op):
    """x where it is positive, else slope times x; the slope is from 0 to 1."""

    slope: float = 0.01
    rule = "... -> ..."
    inplace = ((0, 0),)

    def grad(self, inputs, outputs, dys):
        return (mf.apply(LeakyReluGrad(self.slope), dys[0], outputs[0]),)

    def workspace(self, inputs, outputs, dtype):
        return prod(outputs[0]) * (8 if dtype == "float64" else 4)

    def kernel(self, shard, out, x):
        scaled = shard.work[: x.nbytes].view(x.dtype).reshape(x.shape)
        shard.xp.multiply(x, self.slope, out=scaled)
        shard.xp.maximum(x, scaled, out=out)


@mf.op
class LeakyReluGrad(mf.Op):
    """dy where y is positive, else slope times dy."""

    slope: float = 0.01
    rule = "..., ... -> ..."
    linear = ((0,),)

    def workspace(self, inputs, outputs, dtype):
        return prod(outputs[0])

    def kernel(self, shard, out, dy, y):
        positive = shard.work[: y.size].view(bool).reshape(y.shape)
        shard.xp.greater(y, 0, out=positive)
        shard.xp.multiply(dy, self.slope, out=out)
        shard.xp.copyto(out, dy, where=positive)


def leaky_relu(x, slope=0.01):
    return mf.apply(LeakyRelu(slope), x)


def job(batch: int = 128, lr: float = 0.1, epochs: int = 20) -> mf.Job:
    fields = {"image": ((64,), "uint8"), "label": ((), "int64")}
    train = mf.Dataset("digits/train-*.h5", batch=batch, shuffle=True, fields=fields, rows=1437)

    def model(batch):
        x = mf.cast(batch["image"], "float32") / 16
        x = leaky_relu(nn.Dense(64, name="fc1")(x), slope=0.1)
        logits = nn.Dense(10, name="out")(x)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    return mf.Job("own_op", model, train=train, epochs=epochs, optimizer=mf.SGD(lr=lr))
