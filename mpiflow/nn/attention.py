"""Multi-head attention and the feed-forward layer: the two halves of a transformer's block."""

from __future__ import annotations

from collections.abc import Callable

from mpiflow.errors import GraphError
from mpiflow.graph.graph import Hint, current
from mpiflow.graph.sbp import S
from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Initializer, Layer
from mpiflow.nn.dense import Dense
from mpiflow.ops import (
    attention,
    dropout,
    gelu,
    merge_heads,
    multiply,
    reshape,
    rotary,
    split_heads,
)


class MultiHeadAttention(Layer):
    """x (n, t, width) attends to itself, or to `memory`: (n, t, width).

    One product makes queries, keys and values. Its columns stand in groups, one for each of the
    `kv_heads`: heads / kv_heads queries, one key, one value, each head_width wide; so an axis of
    the mesh can split them by whole groups. `axis` names one that does. `out_init` starts the
    weight of the last product, `init` the others.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        rotary_base: float | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        axis: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name, "attention")
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or width % heads or heads % kv_heads:
            raise GraphError(
                f"MultiHeadAttention {self.name}: {heads} heads must divide the width {width},"
                f" and {kv_heads} key/value heads must divide the {heads} heads"
            )
        self.width, self.heads, self.kv_heads = width, heads, kv_heads
        self.causal, self.rotary_base, self.dropout = causal, rotary_base, dropout
        self.bias, self.init, self.out_init, self.axis = bias, init, out_init or init, axis
        self._layers: dict[str, Dense] = {}

    def __call__(
        self, x: Tensor, *, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; `mask` (n, keys) is true at the keys that may be looked at."""
        self._check(x, mask, memory)
        if self._fresh():
            self._layers = self._make()
        group = self.heads // self.kv_heads
        q, keys, values = self._heads(x, memory, group)
        with current().scope(self.name):
            if self.rotary_base is not None:
                q = rotary(q, positions=x.shape[1], base=self.rotary_base)
                keys = rotary(keys, base=self.rotary_base)
            if mask is not None:
                mask = reshape(mask, (mask.shape[0], 1, 1, mask.shape[1]))
            y = attention(
                q, keys, values, mask=mask, causal=self.causal, group=group, rate=self.dropout
            )
            y = merge_heads(y, self.kv_heads, group)
        return self._layers["out"](y)

    def _make(self) -> dict[str, Dense]:
        """The projections; those that are never called make no variables."""
        head, group = self.width // self.heads, self.heads // self.kv_heads
        parts = {"qkv": group + 2, "query": group, "memory": 2}
        layers = {
            key: self._dense(key, self.kv_heads * part * head, S(1, part * head))
            for key, part in parts.items()
        }
        return layers | {"out": self._dense("out", self.width, S(0, group * head))}

    def _dense(self, key: str, width: int, split: S) -> Dense:
        sbp: Hint | None = {self.axis: split} if self.axis else None
        init = self.out_init if key == "out" else self.init
        return Dense(width, name=f"{self.name}.{key}", bias=self.bias, init=init, sbp=sbp)

    def _heads(self, x: Tensor, memory: Tensor | None, group: int) -> tuple[Tensor, ...]:
        if memory is None:
            projected = self._layers["qkv"](x)
            with current().scope(self.name):
                return split_heads(projected, self.kv_heads, (group, 1, 1))
        query, kv = self._layers["query"](x), self._layers["memory"](memory)
        with current().scope(self.name):
            (q,) = split_heads(query, self.kv_heads, (group,))
            return q, *split_heads(kv, self.kv_heads, (1, 1))

    def _check(self, x: Tensor, mask: Tensor | None, memory: Tensor | None) -> None:
        where = f"\n  {current().where}"
        keys = x if memory is None else memory
        for tensor in (x, keys):
            if tensor.ndim != 3:
                raise GraphError(
                    f"MultiHeadAttention {self.name}: {tensor} is not (n, t, width){where}"
                )
        if mask is not None and (mask.shape, mask.dtype) != (keys.shape[:2], "bool"):
            raise GraphError(
                f"MultiHeadAttention {self.name}: the mask is a bool {keys.shape[:2]}, true at"
                f" the keys that count, not {mask}{where}"
            )
        if memory is not None and (self.causal or self.rotary_base is not None):
            raise GraphError(
                f"MultiHeadAttention {self.name}: attention to a memory has no order that could"
                f" be causal or rotary{where}"
            )


class FeedForward(Layer):
    """x (..., width) -> `hidden` -> (..., width), with an activation between the two products.

    `gated` multiplies the activation with a second product of x (Shazeer 2020): with silu it is
    the layer of Llama. `axis` names an axis of the mesh that splits the hidden dim. `out_init`
    starts the weight of the last product, `init` the others.
    """

    def __init__(
        self,
        hidden: int,
        *,
        activation: Callable[[Tensor], Tensor] = gelu,
        gated: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        axis: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name, "feed_forward")
        self.hidden, self.activation, self.gated = hidden, activation, gated
        self.dropout, self.bias, self.axis = dropout, bias, axis
        self.init, self.out_init = init, out_init or init
        self._layers: dict[str, Dense] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self._fresh():
            self._layers = {
                "up": self._dense("up", self.hidden, 1),
                "gate": self._dense("gate", self.hidden, 1),
                "down": self._dense("down", x.shape[-1], 0),
            }
        up = self._layers["up"](x)
        gate = self._layers["gate"](x) if self.gated else None
        with current().scope(self.name):
            h = self.activation(up) if gate is None else multiply(self.activation(gate), up)
            h = dropout(h, self.dropout)
        return self._layers["down"](h)

    def _dense(self, key: str, width: int, dim: int) -> Dense:
        sbp: Hint | None = {self.axis: S(dim)} if self.axis else None
        init = self.out_init if key == "down" else self.init
        return Dense(width, name=f"{self.name}.{key}", bias=self.bias, init=init, sbp=sbp)
