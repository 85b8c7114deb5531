"""Tables of learned rows: embeddings of ids, and of positions."""

from __future__ import annotations

from mpiflow.errors import GraphError
from mpiflow.graph.graph import Hint, current
from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Initializer, Layer, normal, variable
from mpiflow.ops import add, cut, embedding, linear_transposed


class Embedding(Layer):
    """ids (...) -> rows (..., width) of a learned table (rows, width); normal(0.02) at the start.

    `as_logits` is the output layer that shares the table (tied weights).

    A table that is used by lookups only can be updated by rows: a step then reads and writes the
    rows that it looks up, however large the table is. That is what happens where it gives the same
    as an update of the whole table: with SGD without momentum and with Adagrad, neither with weight
    decay, for tables of more rows than a step has ids. `sparse=True` asks for it with any of SGD,
    Adagrad, Adam and AdamW, for which it is the lazy form: momentum, moments and weight decay of
    the other rows stand still, and a note in the plan says so. `sparse=False` rules it out.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        name: str | None = None,
        init: Initializer | None = None,
        dtype: str = "float32",
        sbp: Hint | None = None,
        sparse: bool | None = None,
    ) -> None:
        super().__init__(name, "embedding")
        if rows < 1 or width < 1:
            raise GraphError(f"Embedding {self.name}: ({rows}, {width}) is no shape of a table")
        self.rows, self.width, self.dtype = rows, width, dtype
        self.init, self.sbp, self.sparse = init or normal(0.02), sbp, sparse
        self._table: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows of `ids`."""
        table = self.table()
        with current().scope(self.name):
            return embedding(table, ids, sparse=self.sparse)

    def as_logits(self, x: Tensor) -> Tensor:
        """x (..., width) times the table: one number a row, (..., rows)."""
        table = self.table()
        with current().scope(self.name):
            return linear_transposed(x, table)

    def table(self) -> Tensor:
        """The table of the current trace."""
        if self._fresh() or self._table is None:
            self._table = variable(
                f"{self.name}.weight",
                (self.rows, self.width),
                self.init,
                dtype=self.dtype,
                sbp=self.sbp,
            )
        return self._table


class Positions(Layer):
    """x (..., t, width) plus a learned row for each position, of which there are `rows`."""

    def __init__(
        self, rows: int, *, name: str | None = None, init: Initializer | None = None
    ) -> None:
        super().__init__(name, "positions")
        if rows < 1:
            raise GraphError(f"Positions {self.name}: there must be a row, not {rows}")
        self.rows, self.init = rows, init or normal(0.02)
        self._table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Add the first t rows."""
        if x.ndim < 2 or x.shape[-2] > self.rows:
            raise GraphError(
                f"Positions {self.name}: {x} is not (..., positions up to {self.rows}, width)"
                f"\n  {current().where}"
            )
        if self._fresh() or self._table is None:
            self._table = variable(
                f"{self.name}.weight", (self.rows, x.shape[-1]), self.init, dtype=x.dtype
            )
        with current().scope(self.name):
            length = x.shape[-2]
            table = self._table
            return add(x, table if length == self.rows else cut(table, 0, length, 0))
