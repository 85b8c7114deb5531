"""Functions of one tensor, each with its gradient in one kernel, in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import pi, prod, sqrt
from typing import Any, ClassVar

from mpiflow.graph.op import ShardView, op
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply
from mpiflow.ops.blocks import flat_blocks, flat_bytes, is_widened
from mpiflow.ops.elementwise import FloatElementwise
from mpiflow.ops.work import in_turn


class Blockwise(FloatElementwise):
    """Base of ops on tensors of one shape: subclasses compute one block at a time.

    `scratch` counts the blocks of scratch, `passes` the operations on an element.
    """

    scratch: ClassVar[int] = 1
    passes: ClassVar[int] = 4

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return flat_bytes(outputs[0], dtype, scratch=self.scratch, operands=1 + len(inputs))

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return self.passes * prod(outputs[0])

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        for y, xs, scratch in flat_blocks(shard, out, arrays, scratch=self.scratch):
            self.block(shard.xp, y, *xs, *scratch)

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        if is_widened(out):
            return super().bind(shard, out, *arrays)
        blocks = flat_blocks(shard, out, arrays, scratch=self.scratch)
        return in_turn([partial(self.block, shard.xp, y, *xs, *a) for y, xs, a in blocks])

    def block(self, xp: Any, y: Any, /, *arrays: Any) -> None:
        """Write `y` from the inputs; the scratch arrays come last."""
        raise NotImplementedError(self.name)


class GradientOfUnary(Blockwise):
    """Base of gradients: dy times the derivative, whose other input is x or y."""

    linear = ((0,),)
    inplace = ((0, 0),)


@op
class Sigmoid(Blockwise):
    """1 / (1 + e^-x), accurate in both tails."""

    inplace = ((0, 0),)
    passes = 8

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(SigmoidGrad(), dys[0], outputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, a: Any) -> None:
        _sigmoid(xp, x, y, a)


def _sigmoid(xp: Any, x: Any, y: Any, a: Any) -> None:
    # e^min(x, 0) / (1 + e^-|x|): no exponential overflows. `y` may be `x`.
    xp.absolute(x, out=a)
    xp.negative(a, out=a)
    xp.exp(a, out=a)
    xp.add(a, 1, out=a)
    xp.minimum(x, 0, out=y)
    xp.exp(y, out=y)
    xp.divide(y, a, out=y)


@op
class SigmoidGrad(GradientOfUnary):
    """dy y (1 - y)."""

    def block(self, xp: Any, out: Any, dy: Any, y: Any, a: Any) -> None:
        xp.subtract(1, y, out=a)
        xp.multiply(a, y, out=a)
        xp.multiply(dy, a, out=out)


@op
class TanhGrad(GradientOfUnary):
    """dy (1 - y^2)."""

    def block(self, xp: Any, out: Any, dy: Any, y: Any, a: Any) -> None:
        xp.multiply(y, y, out=a)
        xp.subtract(1, a, out=a)
        xp.multiply(dy, a, out=out)


@op
class Tanh(FloatElementwise):
    """The hyperbolic tangent."""

    calls = "tanh"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(TanhGrad(), dys[0], outputs[0]),)


@op
class Softplus(Blockwise):
    """log(1 + e^x), as max(x, 0) + log1p(e^-|x|)."""

    inplace = ((0, 0),)
    passes = 6

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(SoftplusGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, a: Any) -> None:
        xp.absolute(x, out=a)
        xp.negative(a, out=a)
        xp.exp(a, out=a)
        xp.log1p(a, out=a)
        xp.maximum(x, 0, out=y)
        xp.add(y, a, out=y)


@op
class SoftplusGrad(GradientOfUnary):
    """dy sigmoid(x)."""

    scratch = 2
    passes = 9

    def block(self, xp: Any, out: Any, dy: Any, x: Any, a: Any, b: Any) -> None:
        _sigmoid(xp, x, b, a)
        xp.multiply(dy, b, out=out)


@op
class Silu(Blockwise):
    """x sigmoid(x), also called swish."""

    inplace = ((0, 0),)
    scratch = 2
    passes = 9

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(SiluGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, a: Any, b: Any) -> None:
        _sigmoid(xp, x, b, a)
        xp.multiply(x, b, out=y)


@op
class SiluGrad(GradientOfUnary):
    """dy s (1 + x (1 - s)) with s = sigmoid(x)."""

    scratch = 2
    passes = 13

    def block(self, xp: Any, out: Any, dy: Any, x: Any, a: Any, b: Any) -> None:
        _sigmoid(xp, x, b, a)
        xp.subtract(1, b, out=a)
        xp.multiply(a, x, out=a)
        xp.add(a, 1, out=a)
        xp.multiply(a, b, out=a)
        xp.multiply(dy, a, out=out)


# Hart (1968), number 5666, as West (2005, "Better approximations to cumulative normal functions")
# prints it: the normal distribution below -z is e^(-z^2/2) N(z) / D(z), to 1e-15 for z in [0, 40].
_NUMERATOR = (
    0.0352624965998911, 0.700383064443688, 6.37396220353165, 33.912866078383, 112.079291497871,
    221.213596169931, 220.206867912376,
)  # fmt: skip
_DENOMINATOR = (
    0.0883883476483184, 1.75566716318264, 16.064177579207, 86.7807322029461, 296.564248779674,
    637.333633378831, 793.826512519948, 440.413735824752,
)  # fmt: skip
_FAR = 40.0


def _polynomial(xp: Any, coefficients: tuple[float, ...], x: Any, out: Any) -> None:
    """Horner's scheme, the highest power first."""
    xp.multiply(x, coefficients[0], out=out)
    for c in coefficients[1:-1]:
        xp.add(out, c, out=out)
        xp.multiply(out, x, out=out)
    xp.add(out, coefficients[-1], out=out)


def normal_distribution(xp: Any, x: Any, p: Any, a: Any, b: Any) -> None:
    """`p` becomes the standard normal distribution at `x`, and `b` e^(-x^2/2); `a` is scratch."""
    xp.absolute(x, out=a)
    xp.minimum(a, _FAR, out=a)
    _polynomial(xp, _NUMERATOR, a, p)
    _polynomial(xp, _DENOMINATOR, a, b)
    xp.divide(p, b, out=p)
    xp.multiply(a, a, out=b)
    xp.multiply(b, -0.5, out=b)
    xp.exp(b, out=b)
    xp.multiply(p, b, out=p)
    # That was the tail beyond |x|; the sign of x says on which side it lies.
    xp.subtract(0.5, p, out=p)
    xp.copysign(p, x, out=p)
    xp.add(p, 0.5, out=p)


@op
class Gelu(Blockwise):
    """x times the standard normal distribution at x (Hendrycks and Gimpel 2016)."""

    inplace = ((0, 0),)
    scratch = 3
    passes = 38

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(GeluGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, p: Any, a: Any, b: Any) -> None:
        normal_distribution(xp, x, p, a, b)
        xp.multiply(x, p, out=y)


@op
class GeluGrad(GradientOfUnary):
    """dy (F(x) + x f(x)) with the normal distribution F and its density f."""

    scratch = 3
    passes = 42

    def block(self, xp: Any, out: Any, dy: Any, x: Any, p: Any, a: Any, b: Any) -> None:
        normal_distribution(xp, x, p, a, b)
        xp.multiply(b, 1 / sqrt(2 * pi), out=b)
        xp.multiply(b, x, out=b)
        xp.add(p, b, out=p)
        xp.multiply(dy, p, out=out)


_K, _CUBE = sqrt(2 / pi), 0.044715


@op
class GeluTanh(Blockwise):
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, the approximation of GPT-2."""

    inplace = ((0, 0),)
    passes = 9

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(GeluTanhGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, a: Any) -> None:
        _inner_tanh(xp, x, a)
        xp.add(a, 1, out=a)
        xp.multiply(a, 0.5, out=a)
        xp.multiply(x, a, out=y)


def _inner_tanh(xp: Any, x: Any, a: Any) -> None:
    xp.multiply(x, x, out=a)
    xp.multiply(a, _K * _CUBE, out=a)
    xp.add(a, _K, out=a)
    xp.multiply(a, x, out=a)
    xp.tanh(a, out=a)


@op
class GeluTanhGrad(GradientOfUnary):
    """dy (1 + t + x (1 - t^2) u') / 2 with t = tanh(u)."""

    scratch = 3
    passes = 18

    def block(self, xp: Any, out: Any, dy: Any, x: Any, t: Any, a: Any, b: Any) -> None:
        _inner_tanh(xp, x, t)
        xp.multiply(x, x, out=a)
        xp.multiply(a, 3 * _K * _CUBE, out=a)
        xp.add(a, _K, out=a)
        xp.multiply(a, x, out=a)
        xp.multiply(t, t, out=b)
        xp.subtract(1, b, out=b)
        xp.multiply(a, b, out=a)
        xp.add(a, t, out=a)
        xp.add(a, 1, out=a)
        xp.multiply(a, 0.5, out=a)
        xp.multiply(dy, a, out=out)


@op
class Absolute(FloatElementwise):
    """|x|."""

    calls = "absolute"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(AbsoluteGrad(), dys[0], inputs[0]),)


@op
class AbsoluteGrad(FloatElementwise):
    """dy with the sign of x; zero where x is."""

    linear = ((0,),)
    inplace = ((1, 0),)

    def kernel(self, shard: ShardView, out: Any, dy: Any, x: Any) -> None:
        shard.xp.sign(x, out=out)
        shard.xp.multiply(out, dy, out=out)


@op
class Power(FloatElementwise):
    """x to the power of a number."""

    exponent: float
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(PowerGrad(self.exponent), dys[0], inputs[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        shard.xp.power(x, self.exponent, out=out)


@op
class PowerGrad(FloatElementwise):
    """dy p x^(p-1)."""

    exponent: float
    linear = ((0,),)
    inplace = ((1, 0),)

    def kernel(self, shard: ShardView, out: Any, dy: Any, x: Any) -> None:
        shard.xp.power(x, self.exponent - 1, out=out)
        shard.xp.multiply(out, self.exponent, out=out)
        shard.xp.multiply(out, dy, out=out)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return apply(Sigmoid(), x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return apply(Tanh(), x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return apply(Softplus(), x)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), also called swish."""
    return apply(Silu(), x)


def gelu(x: Tensor, *, approximate: bool = False) -> Tensor:
    """x times the normal distribution at x; `approximate` is the tanh form of GPT-2."""
    return apply(GeluTanh() if approximate else Gelu(), x)


def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return apply(Absolute(), x)


def power(x: Tensor, exponent: float) -> Tensor:
    """x to the power of a number."""
    return apply(Power(float(exponent)), x)
