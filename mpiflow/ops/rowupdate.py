"""Updates of some rows of a table: no other row is read or written.

Inputs are those of the update of a whole table, with the sums of `SumRows` for the gradient and
then their ids. What an update does to a row of gradient zero it does not do here to the rows that
are left out, which is the lazy form: their momentum, moments and weight decay stand still.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape, Signature
from mpiflow.graph.sbp import UNION, B, S, Sbp
from mpiflow.ops.base import require_float
from mpiflow.ops.runs import BLOCK_ROWS, block_rows, block_size
from mpiflow.ops.update import AdagradUpdate, AdamUpdate, Arrays, SgdUpdate, Update
from mpiflow.ops.work import Piece, carve, carved

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class RowUpdate(Update):
    """Base of updates by rows: table (v, d), values (n, d), ids (n,), scalars, what is kept (v, d).

    Ids ascend and do not repeat; those of no row that is held here are passed over. If `block` is
    not 0, ids are (blocks, k) and values (blocks, k, d), as for `TakeRows`: the ids of a block lie
    among its own `block` rows, and all of it may be split by whole blocks.
    """

    block: int = 0

    @property
    def inplace(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """The table, and what is kept beside it, change where they stand."""
        first = 3 + self.scalars + self.clipped
        return ((0, 0), *((first + i, 1 + i) for i in range(self._states)))

    def abreast(self) -> tuple[tuple[range, ...], tuple[range, ...]]:
        return (), ()

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        if self.ema:
            raise GraphError(f"{self.name} keeps no average, which changes in every row")
        ids: Dims = (("b",), ("k",)) if self.block else (("n",),)
        table: Dims = (("b", "s") if self.block else ("v",), ("d",))
        scalars = ((),) * (self.scalars + self.clipped)
        inputs = (table, (*ids, ("d",)), ids, *scalars, *(table,) * self._states)
        return Rule(inputs, self._results((table,)))

    def sizes(self) -> dict[str, int]:
        return {"s": self.block} if self.block else {}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset({"n", "s", "k"})

    def by_owner(self, shapes: tuple[Shape, ...]) -> tuple[Signature, ...]:
        if self.block:
            return ()
        scalars: tuple[Sbp, ...] = (B,) * (self.scalars + self.clipped)
        tables: tuple[Sbp, ...] = (S(0),) * self._states
        return (Signature((S(0), UNION, UNION, *scalars, *tables), (S(0), *tables)),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        if dtypes[2] != "int64":
            raise GraphError(f"{self.name}: ids are int64, not {dtypes[2]}; cast them")
        floats = (*dtypes[:2], *dtypes[3:])
        require_float(self, floats)
        return Op.dtypes(self, floats) * (1 + self._states)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(inputs[1]) * (self.passes + self.clipped)

    def touched(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> tuple[Shape, ...]:
        table = inputs[0]
        rows = (min(prod(inputs[2]), table[0]), table[1])
        return tuple(rows if shape == table else shape for shape in (*inputs, *outputs))

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(*self._pieces(prod(inputs[2]), inputs[0][1], dtype))

    def device_workspace(
        self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str
    ) -> int:
        return self.workspace(inputs, outputs, dtype)

    def _pieces(self, count: int, width: int, dtype: Any) -> tuple[Piece, ...]:
        local = ((min(count, BLOCK_ROWS),), "int64")
        block = ((block_size(count, width),), dtype)
        return local, *(block,) * (1 + self._states + self.lanes)

    def kernel(self, shard: ShardView, out: Any, w: Any, g: Any, *rest: Any) -> None:
        xp, ids, count = shard.xp, rest[0].reshape(-1), 1 + self.scalars + self.clipped
        new = list(out) if self._states else [out]
        for target, source in zip(new, (w, *rest[count:]), strict=True):
            xp.copyto(target, source)  # nothing is copied where they are one array
        if not w.size:
            return
        start = shard.start(OUT, 0)
        first, last = 0, ids.size
        if not hasattr(xp, "put_rows"):  # which leaves out what is not there, and so need not know
            first, last = (int(xp.searchsorted(ids, start + end)) for end in (0, len(w)))
        g, step = g.reshape(-1, w.shape[1]), block_rows(w.shape[1])
        local, *lanes = carve(shard.work, *self._pieces(ids.size, w.shape[1], w.dtype))
        for begin in range(first, last, step):
            part = slice(begin, min(begin + step, last))
            rows = xp.subtract(ids[part], start, out=local[: part.stop - begin])
            self._update_rows(xp, new, rows, g[part], rest[1:count], lanes)

    def _update_rows(
        self, xp: Any, tables: Arrays, rows: Any, g: Any, scalars: tuple[Any, ...], lanes: Arrays
    ) -> None:
        """Take the rows of every table, update them side by side, and put them back."""
        lanes = [lane[: g.size] for lane in lanes]
        taken, lanes = lanes[: len(tables)], lanes[len(tables) :]
        for table, block in zip(tables, taken, strict=True):
            xp.take(table, rows, axis=0, out=block.reshape(g.shape), mode="clip")
        old = [taken[0], g.reshape(-1), *taken[1:]]
        self._block(xp, taken, old, scalars, lanes)
        for table, block in zip(tables, taken, strict=True):
            if hasattr(xp, "put_rows"):
                xp.put_rows(table, rows, block)
            else:
                table[rows] = block.reshape(g.shape)


@op
class SgdRowUpdate(RowUpdate, SgdUpdate):
    """`SgdUpdate` of some rows."""


@op
class AdagradRowUpdate(RowUpdate, AdagradUpdate):
    """`AdagradUpdate` of some rows."""


@op
class AdamRowUpdate(RowUpdate, AdamUpdate):
    """`AdamUpdate` of some rows: the lazy form of Adam, whose corrections count all steps."""


_FORMS: dict[type[Update], type[RowUpdate]] = {
    SgdUpdate: SgdRowUpdate,
    AdagradUpdate: AdagradRowUpdate,
    AdamUpdate: AdamRowUpdate,
}


def by_rows(update: Update, block: int) -> RowUpdate:
    """The update of some rows that does to each of them what this one does to all."""
    settings: dict[str, Any] = {field.name: getattr(update, field.name) for field in fields(update)}
    return _FORMS[type(update)](**settings, block=block)
