"""Functions of one tensor, each with its gradient in one kernel, in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, pi, prod, sqrt
from typing import Any, ClassVar

from mpiflow.graph.op import ShardView, op
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply
from mpiflow.ops.blocks import flat_blocks, flat_bytes, is_widened
from mpiflow.ops.elementwise import FloatElementwise
from mpiflow.ops.work import clamp, in_turn


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
    scratch = 0
    passes = 4

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(SigmoidGrad(), dys[0], outputs[0]),)

    def block(self, xp: Any, y: Any, x: Any) -> None:
        _sigmoid(xp, x, y)


def _sigmoid(xp: Any, x: Any, y: Any) -> None:
    """1 / (1 + e^-x); `y` may be `x`. The sum is infinite only where the quotient is nearly 0."""
    _one_and_exponential(xp, x, y)
    xp.divide(1, y, out=y)


def _one_and_exponential(xp: Any, x: Any, y: Any) -> None:
    """1 + e^-x."""
    xp.negative(x, out=y)
    xp.exp(y, out=y)
    xp.add(y, 1, out=y)


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
        clamp(xp, x, 0, inf, y)
        xp.add(y, a, out=y)


@op
class SoftplusGrad(GradientOfUnary):
    """dy sigmoid(x)."""

    def block(self, xp: Any, out: Any, dy: Any, x: Any, a: Any) -> None:
        _one_and_exponential(xp, x, a)
        xp.divide(dy, a, out=out)


@op
class Silu(Blockwise):
    """x sigmoid(x), also called swish."""

    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(SiluGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, a: Any) -> None:
        _one_and_exponential(xp, x, a)
        xp.divide(x, a, out=y)


@op
class SiluGrad(GradientOfUnary):
    """dy s (1 + x (1 - s)) with s = sigmoid(x)."""

    scratch = 2
    passes = 9

    def block(self, xp: Any, out: Any, dy: Any, x: Any, a: Any, b: Any) -> None:
        # Beyond the limit it is 0 or 1 to the last digit, and before it no product is infinite.
        clamp(xp, x, -84.0, 84.0, a)
        xp.negative(a, out=b)
        xp.exp(b, out=b)
        xp.multiply(a, b, out=a)
        xp.add(b, 1, out=b)
        xp.divide(a, b, out=a)
        xp.add(a, 1, out=a)
        xp.divide(a, b, out=a)
        xp.multiply(dy, a, out=out)


# What of the normal distribution lies beyond z is e^(-z^2/2) N(z) / D(z); coefficients are from the
# highest power to the constant.
# Double precision: Hart (1968), number 5666, as West (2005, "Better approximations to cumulative
# normal functions") prints it, to 1e-15 for z in [0, 40].
_DOUBLE = (
    (0.0352624965998911, 0.700383064443688, 6.37396220353165, 33.912866078383, 112.079291497871,
     221.213596169931, 220.206867912376),
    (0.0883883476483184, 1.75566716318264, 16.064177579207, 86.7807322029461, 296.564248779674,
     637.333633378831, 793.826512519948, 440.413735824752),
)  # fmt: skip
# Single precision: fitted for this file, to 6e-8 (1 + z^2/2) of the value for z in [0, 14.5]: so
# much it changes when the last bit of z does.
_SINGLE = (
    (0.39881859, 2.99081992, 9.44143876, 13.77250532),
    (1.0, 7.48640901, 24.81215615, 40.86051407, 27.54501227),
)
_FAR = {"float64": 40.0, "float32": 14.5}
"""Where the tail has become 0."""


def _polynomial(xp: Any, coefficients: tuple[float, ...], x: Any, out: Any) -> None:
    """Horner's scheme, the highest power first."""
    first, second, *others = coefficients
    if first == 1.0:
        xp.add(x, second, out=out)
    else:
        xp.multiply(x, first, out=out)
        xp.add(out, second, out=out)
    for c in others:
        xp.multiply(out, x, out=out)
        xp.add(out, c, out=out)


def _tail(xp: Any, x: Any, p: Any, a: Any, b: Any) -> None:
    """`a` becomes |x|, `b` e^(-a^2/2), and `p` what of the normal distribution lies beyond a / b.

    Far out, where b is 0, `a` stands still. Limits are arrays here: where they are numbers, NumPy's
    minimum and maximum take one element at a time.
    """
    xp.absolute(x, out=a)
    b.fill(_FAR[a.dtype.name])
    xp.minimum(a, b, out=a)
    numerator, denominator = _DOUBLE if a.dtype.itemsize == 8 else _SINGLE
    _polynomial(xp, numerator, a, p)
    _polynomial(xp, denominator, a, b)
    xp.divide(p, b, out=p)
    xp.multiply(a, -0.5, out=b)
    xp.multiply(b, a, out=b)
    xp.exp(b, out=b)


@op
class Gelu(Blockwise):
    """x times the standard normal distribution at x (Hendrycks and Gimpel 2016)."""

    inplace = ((0, 0),)
    scratch = 3
    passes = 25

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(GeluGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, p: Any, a: Any, b: Any) -> None:
        # max(x, 0) - |x| tail: for x > 0 it is x - x tail, else x tail.
        _tail(xp, x, p, a, b)
        xp.multiply(p, b, out=p)
        xp.multiply(p, a, out=p)
        b.fill(0)
        xp.maximum(x, b, out=y)
        xp.subtract(y, p, out=y)


@op
class GeluGrad(GradientOfUnary):
    """dy (F(x) + x f(x)) with the normal distribution F and its density f."""

    scratch = 3
    passes = 30

    def block(self, xp: Any, out: Any, dy: Any, x: Any, p: Any, a: Any, b: Any) -> None:
        # tail - |x| f(x) for x < 0, and what is left of 1 for x > 0.
        _tail(xp, x, p, a, b)
        xp.multiply(a, 1 / sqrt(2 * pi), out=a)
        xp.subtract(p, a, out=p)
        xp.multiply(p, b, out=p)
        positive = a.view(bool)[: a.size]
        xp.greater(x, 0, out=positive)
        xp.copyto(b, positive)
        xp.multiply(b, -2, out=a)
        xp.add(a, 1, out=a)
        xp.multiply(p, a, out=p)
        xp.add(p, b, out=p)
        xp.multiply(dy, p, out=out)


_K, _CUBE = sqrt(2 / pi), 0.044715
_LIMIT = 10.0


@op
class GeluTanh(Blockwise):
    """x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), the approximation of GPT-2.

    That is x sigmoid(2 u), which keeps its digits in the tail.
    """

    inplace = ((0, 0),)
    passes = 8

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(GeluTanhGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, a: Any) -> None:
        xp.multiply(x, x, out=a)
        _twice(xp, x, a, _CUBE, a)
        _one_and_exponential(xp, a, a)
        xp.divide(x, a, out=y)


def _twice(xp: Any, x: Any, square: Any, cube: float, out: Any) -> None:
    """2 sqrt(2/pi) (x + cube x^3), given x and its square; `out` may be `square`."""
    xp.multiply(square, 2 * _K * cube, out=out)
    xp.add(out, 2 * _K, out=out)
    xp.multiply(out, x, out=out)


@op
class GeluTanhGrad(GradientOfUnary):
    """dy s (1 + (1 - s) 2 x u') with s = sigmoid(2 u)."""

    scratch = 3
    passes = 16

    def block(self, xp: Any, out: Any, dy: Any, x: Any, s: Any, a: Any, b: Any) -> None:
        # Beyond the limit it is 0 or 1 to the last digit, and before it no power is infinite.
        clamp(xp, x, -_LIMIT, _LIMIT, a)
        xp.multiply(a, a, out=b)
        _twice(xp, a, b, _CUBE, s)
        _twice(xp, a, b, 3 * _CUBE, b)
        xp.negative(s, out=s)
        xp.exp(s, out=s)
        xp.add(s, 1, out=a)
        xp.divide(s, a, out=s)
        xp.multiply(b, s, out=b)
        xp.add(b, 1, out=b)
        xp.divide(b, a, out=b)
        xp.multiply(dy, b, out=out)


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
