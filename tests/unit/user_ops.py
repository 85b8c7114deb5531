"""Ops as a user writes them: one that is right, and others each with a fault."""

import mpiflow as mf


@mf.op
class Cubed(mf.Op):
    """x^3 / scale."""

    scale: float = 1.0
    rule = "... -> ..."
    inplace = ((0, 0),)

    def grad(self, inputs, outputs, dys):
        return (dys[0] * mf.square(inputs[0]) * (3.0 / self.scale),)

    def workspace(self, inputs, outputs, dtype):
        size = 8
        for n in outputs[0]:
            size *= n
        return size

    def kernel(self, shard, out, x):
        squared = shard.work[: x.nbytes].view(x.dtype).reshape(x.shape)
        shard.xp.multiply(x, x, out=squared)
        shard.xp.multiply(x, squared, out=out)
        shard.xp.multiply(out, 1 / self.scale, out=out)


@mf.op
class RowSum(mf.Op):
    """The sum of each row."""

    rule = "n c -> n"
    linear = ((0,),)

    def grad(self, inputs, outputs, dys):
        return (mf.reshape(dys[0], (-1, 1)) + inputs[0] * 0.0,)

    def kernel(self, shard, out, x):
        shard.xp.add.reduce(x, axis=1, out=out)


@mf.op
class Centred(mf.Op):
    """A fault: the mean over a dim that may be split is that of the shard."""

    rule = "n c -> n c"

    def kernel(self, shard, out, x):
        shard.xp.subtract(x, x.mean(0), out=out)


class Fault(mf.Op):
    rule = "... -> ..."

    def grad(self, inputs, outputs, dys):
        return (dys[0] * 2.0,)


@mf.op
class Allocates(Fault):
    def kernel(self, shard, out, x):
        out[...] = 2 * x


@mf.op
class GivesBack(Fault):
    def kernel(self, shard, out, x):
        return 2 * x


@mf.op
class WritesNothing(Fault):
    def kernel(self, shard, out, x):
        out = 2 * x  # noqa: F841


@mf.op
class WritesAnotherShape(Fault):
    def kernel(self, shard, out, x):
        out[...] = x.T


@mf.op
class ChangesItsInput(Fault):
    def kernel(self, shard, out, x):
        x *= 2
        out[...] = x


@mf.op
class WrongGradient(Fault):
    def kernel(self, shard, out, x):
        shard.xp.multiply(x, 3, out=out)


@mf.op
class NotLinear(Fault):
    linear = ((0,),)

    def grad(self, inputs, outputs, dys):
        return (dys[0],)

    def kernel(self, shard, out, x):
        shard.xp.add(x, 1, out=out)


@mf.op
class TooSmallWorkspace(Fault):
    def workspace(self, inputs, outputs, dtype):
        return 8

    def kernel(self, shard, out, x):
        scratch = shard.work[: x.nbytes].view(x.dtype).reshape(x.shape)
        shard.xp.multiply(x, 2, out=scratch)
        out[...] = scratch


@mf.op
class TwoOutputs(mf.Op):
    rule = "... -> ..., ..."

    def kernel(self, shard, out, x):
        out[0][...] = out[1][...] = x


@mf.op
class NoSuchLetter(mf.Op):
    rule = "n -> n c"

    def kernel(self, shard, out, x):
        out[...] = 0


@mf.op
class GradientOfAnotherShape(Fault):
    def grad(self, inputs, outputs, dys):
        return (mf.reduce_sum(dys[0]),)

    def kernel(self, shard, out, x):
        shard.xp.multiply(x, 2, out=out)


@mf.op
class OneGradient(mf.Op):
    rule = "..., ... -> ..."

    def grad(self, inputs, outputs, dys):
        return (dys[0],)

    def kernel(self, shard, out, x, y):
        shard.xp.add(x, y, out=out)
