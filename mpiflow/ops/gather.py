"""Places of each row by number: x (n, t, *rest), index (n, k) -> (n, k, *rest), and back.

Every row has numbers of its own, where `embedding` takes all from one table.
"""

from __future__ import annotations

from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal
from mpiflow.ops.index import require_index
from mpiflow.ops.runs import add_rows, run_bytes
from mpiflow.ops.window import letters
from mpiflow.ops.work import Piece, carve, carved, clear_rows


class Places(Op):
    """Base: one operand is (n, t, *rest), one (n, k, *rest), and the index is (n, k)."""

    linear = ((0,),)
    precision = "follow"

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[1])
        if dtypes[0] == "bool":
            raise GraphError(f"{self.name} takes numbers, not bool; cast them")
        return dtypes[:1]

    def _rule(self, source: str, target: str, shapes: tuple[Shape, ...]) -> Rule:
        rest = letters("d", len(shapes[0]) - 2)
        inputs = (("n",), (source,), *rest), (("n",), ("k",))
        return Rule(inputs, ((("n",), (target,), *rest),))


@op
class Gather(Places):
    """x (n, t, *rest), index (n, k) -> (n, k, *rest); zeros for places that are held elsewhere."""

    indexes = ((1, 0, 1),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return self._rule("t", "k", shapes)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(outputs[0])

    def touched(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """Of x as much as is taken from it."""
        return outputs[0], inputs[1], outputs[0]

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(*_pieces(inputs[1]))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, index = inputs
        return apply(GatherGrad(x.shape[1]), dys[0], index), None

    def kernel(self, shard: ShardView, out: Any, x: Any, index: Any) -> None:
        if not out.size or not x.size:
            out.fill(0)
            return
        xp = shard.xp
        number, elsewhere = _numbers(xp, shard.work, index, shard.start(0, 1), x.shape[1])
        rows = out.reshape(number.size, -1)
        xp.take(x.reshape(x.shape[0] * x.shape[1], -1), number, axis=0, out=rows, mode="clip")
        clear_rows(xp, rows, elsewhere)


@op
class GatherGrad(Places):
    """The gradient of `Gather`: dy (n, k, *rest), index (n, k) -> (n, places, *rest).

    What several indices of a row give one place is added in their order.
    """

    places: int
    indexes = ((1, 2, 1),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return self._rule("k", "t", shapes)

    def sizes(self) -> dict[str, int]:
        return {"t": self.places}

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(inputs[0]) + prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        count, width = prod(inputs[1]), prod(inputs[0][2:])
        return carved(*_pieces(inputs[1])) + run_bytes((count, width), dtype, lanes=3)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return apply(Gather(), dys[0], inputs[1]), None

    def kernel(self, shard: ShardView, out: Any, dy: Any, index: Any) -> None:
        out.fill(0)
        if not out.size or not dy.size:
            return
        xp, work = shard.xp, shard.work
        number, _ = _numbers(xp, work, index, shard.start(OUT, 1), out.shape[1])
        sums_of = out.reshape(out.shape[0] * out.shape[1], -1)
        values = dy.reshape(number.size, -1)
        work = work[carved(*_pieces(index.shape)) :]
        add_rows(xp, work, sums_of, values, number, 0)


def _pieces(index: Shape) -> tuple[Piece, ...]:
    return (index, "int64"), (index, "bool"), (index[:1], "int64")


def _numbers(xp: Any, work: Any, index: Any, start: int, held: int) -> tuple[Any, Any]:
    """Flat numbers of the places in (n, held), -1 for those held elsewhere; and which these are.

    The shard holds the places from `start` on.
    """
    number, elsewhere, before = carve(work, *_pieces(index.shape))
    xp.copyto(number, index, casting="unsafe")
    xp.subtract(number, start, out=number)
    # One unsigned comparison is number < 0 or number >= held.
    xp.greater_equal(number.view(xp.uint64), held, out=elsewhere)
    before.fill(held)
    before[:1] = 0
    xp.add.accumulate(before, out=before)
    xp.add(number, before[:, None], out=number)
    xp.copyto(number, -1, where=elsewhere)
    return number.reshape(-1), elsewhere.reshape(-1)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """The places of each row that `index` names: x (n, t, *rest), index (n, k) -> (n, k, *rest).

    Indices outside of t are refused where they are read, if they are a field of the batch; else
    they give zeros.
    """
    if x.ndim < 2 or index.ndim != 2 or x.shape[0] != index.shape[0]:
        raise refusal(f"gather: {x} is not (n, t, ...) or the index {index} not (n, k)")
    return apply(Gather(), x, index)
