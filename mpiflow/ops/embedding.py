"""Rows of a table by number, and the sum of row gradients back into the table."""

from __future__ import annotations

from math import prod
from typing import Any

from mpiflow.graph.op import OUT, ShardView, op
from mpiflow.graph.rule import Shape, Signature
from mpiflow.graph.sbp import S
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal
from mpiflow.ops.index import require_index
from mpiflow.ops.rows import Lookup, RowGradient
from mpiflow.ops.runs import add_rows, run_bytes
from mpiflow.ops.work import clear_rows


@op
class Embedding(Lookup):
    """table (v, d), ids (...) -> the rows (..., d); zeros for rows that are held elsewhere."""

    sparse: bool | None = None
    rule = "v d, ... -> ... d"
    linear = ((0,),)
    indexes = ((1, 0, 0),)

    def by_owner(self, shapes: tuple[Shape, ...]) -> tuple[Signature, ...]:
        return (Signature((S(0), S(0)), (S(0),)),) if shapes[1] else ()

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return 9 * prod(inputs[1])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        table, ids = inputs
        return apply(EmbeddingGrad(table.shape[0]), dys[0], ids), None

    def kernel(self, shard: ShardView, out: Any, table: Any, ids: Any) -> None:
        xp, n = shard.xp, ids.size
        if not out.size or not len(table):
            out.fill(0)
            return
        local, mine = shard.work[: 8 * n].view(xp.int64), shard.work[8 * n :][:n].view(bool)
        xp.copyto(local, ids.reshape(-1), casting="unsafe")
        xp.subtract(local, shard.start(0, 0), out=local)
        rows = out.reshape(n, -1)
        xp.take(table, local, axis=0, out=rows, mode="clip")
        # One unsigned comparison says whether 0 <= local < the rows held here.
        xp.greater_equal(local.view(xp.uint64), len(table), out=mine)
        clear_rows(xp, rows, mine)


@op
class EmbeddingGrad(RowGradient):
    """The gradient of a table of `rows`: dy (..., d), ids (...) -> (rows, d).

    Gradients of one row are added in the order of their positions, so the sum is deterministic.
    """

    rows: int
    rule = "... d, ... -> v d"
    linear = ((0,),)
    indexes = ((1, 2, 0),)

    def sizes(self) -> dict[str, int]:
        return {"v": self.rows}

    def by_owner(self, shapes: tuple[Shape, ...]) -> tuple[Signature, ...]:
        return (Signature((S(0), S(0)), (S(0),)),) if shapes[1] else ()

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[1])
        return dtypes[:1]

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(inputs[0]) + prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return run_bytes((prod(inputs[1]), inputs[0][-1]), dtype, lanes=3)

    def kernel(self, shard: ShardView, out: Any, dy: Any, ids: Any) -> None:
        out.fill(0)
        if not out.size or not dy.size:
            return
        values, start = dy.reshape(-1, dy.shape[-1]), shard.start(OUT, 0)
        add_rows(shard.xp, shard.work, out, values, ids.reshape(-1), start)


def embedding(table: Tensor, ids: Tensor, *, sparse: bool | None = None) -> Tensor:
    """The rows of a table (v, d) that `ids` (...) name: (..., d).

    Ids outside of the table are refused where they are read, if they are a field of the batch; else
    they give zeros. `sparse` says how the table is updated; see `nn.Embedding`.
    """
    if sparse not in (None, True, False):
        raise refusal(f"embedding: sparse is True, False or None, not {sparse!r}")
    return apply(Embedding(sparse if sparse is None else bool(sparse)), table, ids)
