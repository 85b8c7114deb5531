"""Gradients of tables by rows: a pair of ordinary tensors, values and the ids of their rows.

A table has a row gradient if it is used by lookups only. Its update then reads and writes the rows
that a step looked up, and no others; see `rowupdate` for the updates and `optim.rows` for who
decides.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape, Signature
from mpiflow.graph.sbp import UNION, B, S
from mpiflow.ops.base import Gradients, Tensors, apply, require_float
from mpiflow.ops.index import require_index
from mpiflow.ops.runs import run_bytes, runs, sorted_keys, sum_run, sum_runs

PADDING = 2**63 - 1
"""The id of an entry that is no row; it comes after all others."""


class Lookup(Op):
    """Base of ops that read some rows of a table, their first input: table, ids -> rows.

    `sparse` says whether the gradient may be one of rows: True, False, or None where an update of
    these rows alone is the same as one of the whole table.
    """

    sparse: bool | None = None

    def touched(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> tuple[Shape, ...]:
        rows = min(prod(inputs[1]), inputs[0][0])
        return (rows, inputs[0][1]), *inputs[1:], *outputs

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes[:1])
        require_index(self, dtypes[1])
        return dtypes[:1]

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(outputs[0])


class RowGradient(Op):
    """Base of gradients of a lookup: dy, ids -> a gradient like the table."""


@op
class SumRows(Op):
    """values (..., d), ids (...) -> the sum of the values of each row, and the ids of these sums.

    Ids ascend, each there once. What is left of the entries is zero, with the id `PADDING`, and so
    are values whose ids lie outside of the table's `rows`. Where `clears` is false, sums of padding
    are not set.
    """

    rows: int
    clears: bool = True
    rule = "... d, ... -> ... d, ..."

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        count = prod(shapes[1])
        if self.rows.bit_length() + count.bit_length() > 63:
            raise GraphError(f"{self.name}: {count} ids of {self.rows} rows are too many to sort")
        return super().pattern(shapes)

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(rule.letters) - {"d"}

    def signatures(
        self, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]
    ) -> tuple[Signature, ...]:
        found = super().signatures(shapes, dtypes)  # the ids follow from the ids, whatever is split
        return tuple(replace(one, outputs=(one.outputs[0], B)) for one in found)

    def by_owner(self, shapes: tuple[Shape, ...]) -> tuple[Signature, ...]:
        return (Signature((S(0), S(0)), (UNION, UNION)),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes[:1])
        require_index(self, dtypes[1])
        return dtypes[0], "int64"

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(inputs[0]) + prod(inputs[1])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return run_bytes(inputs[0], dtype, lanes=2)

    def kernel(self, shard: ShardView, out: Any, values: Any, ids: Any) -> None:
        xp, count = shard.xp, ids.size
        sums, values = (x.reshape(count, x.shape[-1]) for x in (out[0], values))
        rows, ids = out[1].reshape(count), ids.reshape(count)
        if hasattr(xp, "sum_sorted"):
            self._sum_without_waiting(shard, sums, rows, values, ids)
            return
        done, last = 0, -1
        for target, place, lanes in runs(xp, shard.work, values, ids, 0, self.rows, lanes=2):
            begun = int(xp.searchsorted(target, last, side="right"))  # of the last run before
            if begun:
                sum_run(xp, values, place[:begun], lanes[1][0], lanes[0])
                xp.add(sums[done - 1], lanes[1][0], out=sums[done - 1])
            target, place = target[begun:], place[begun:]
            starts = sum_runs(xp, target, values, place, sums[done:], lanes)
            xp.take(target, starts, out=rows[done : done + len(starts)], mode="clip")
            done += len(starts)
            last = int(target[-1]) if len(target) else last
        if self.clears:
            sums[done:] = 0
        rows[done:] = PADDING

    def _sum_without_waiting(
        self, shard: ShardView, sums: Any, rows: Any, values: Any, ids: Any
    ) -> None:
        """The same on a GPU, which must not be asked how many rows there are."""
        if not ids.size:
            return
        xp = shard.xp
        keys, place, shift, _ = sorted_keys(xp, shard.work, values, ids, 0, self.rows, lanes=2)
        row = xp.right_shift(keys, shift)
        place[:1] = 0
        xp.not_equal(row[1:], row[:-1], out=place[1:])
        xp.add.accumulate(place, out=place)
        xp.copyto(row, PADDING, where=xp.equal(row, self.rows))
        rows.fill(PADDING)
        xp.put_rows(rows, place, row)
        if self.clears:
            sums.fill(0)
        xp.sum_sorted(sums, values, keys, place, shift, self.rows)


@op
class TakeRows(Lookup):
    """table (blocks * size, d), ids (blocks, k) -> rows (blocks, k, d).

    The ids of a block, which ascend and do not repeat, lie among its own rows, the `size` from
    block * size on: so a table that is split by whole blocks is read without a message.
    """

    size: int
    sparse: bool | None = None
    rule = "(b s) d, b k -> b k d"
    whole = "s k"
    linear = ((0,),)

    def sizes(self) -> dict[str, int]:
        return {"s": self.size}

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return 8 * prod(inputs[1])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return apply(TakeRowsGrad(self.size), dys[0], inputs[1]), None

    def kernel(self, shard: ShardView, out: Any, table: Any, ids: Any) -> None:
        if out.size:
            local = _local(shard, ids, shard.start(0, 0))
            shard.xp.take(table, local, axis=0, out=out.reshape(-1, out.shape[-1]), mode="clip")


@op
class TakeRowsGrad(RowGradient):
    """The gradient of `TakeRows`: dy (blocks, k, d), ids (blocks, k) -> (blocks * size, d)."""

    size: int
    rule = "b k d, b k -> (b s) d"
    whole = "s k"
    linear = ((0,),)

    def sizes(self) -> dict[str, int]:
        return {"s": self.size}

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[1])
        return dtypes[:1]

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return 8 * prod(inputs[1])

    def kernel(self, shard: ShardView, out: Any, dy: Any, ids: Any) -> None:
        out.fill(0)
        if dy.size:
            out[_local(shard, ids, shard.start(OUT, 0))] = dy.reshape(-1, dy.shape[-1])


def _local(shard: ShardView, ids: Any, start: int) -> Any:
    """The ids, flat, counted from the first row that is held here."""
    local = shard.work[: 8 * ids.size].view(shard.xp.int64)
    shard.xp.copyto(local, ids.reshape(-1), casting="unsafe")
    return shard.xp.subtract(local, start, out=local)
