"""Index rules: one pattern such as `... m k, ... k n -> ... m n` says what an op does to its dims.

Every dim has a letter. A letter has one size wherever it occurs; a letter that the outputs lost
was reduced away. From this follow shapes, every legal signature and the flops:

    everything B                                   always
    a letter split: S where it occurs, B elsewhere, P on outputs that lost it
    a linear group of inputs P                     gives P outputs

`(h d)` is a compound dim, whose leading letter may be split (in units of the others); `...`
stands for as many leading dims as the operands have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import prod

from mpiflow.errors import GraphError
from mpiflow.graph.sbp import B, Partial, S, Sbp

Shape = tuple[int, ...]
_DIM = re.compile(r"\(([^)]*)\)|(\S+)")


@dataclass(frozen=True, slots=True)
class Signature:
    """One consistent choice of SBP for the inputs and outputs of an op, on one mesh axis."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed pattern: for each operand, the letters of each dim (several for a compound)."""

    inputs: tuple[tuple[tuple[str, ...], ...], ...]
    outputs: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def letters(self) -> tuple[str, ...]:
        """All letters, in order of first appearance."""
        return tuple(dict.fromkeys(x for o in self.inputs + self.outputs for dim in o for x in dim))

    def sizes(self, name: str, shapes: tuple[Shape, ...], given: dict[str, int]) -> dict[str, int]:
        """The size of each letter; `given` are those that the shapes do not tell."""
        if len(shapes) != len(self.inputs):
            raise GraphError(f"{name} takes {len(self.inputs)} inputs, {len(shapes)} were given")
        sizes = dict(given)
        for operand, (dims, shape) in enumerate(zip(self.inputs, shapes, strict=True)):
            if len(dims) != len(shape):
                raise GraphError(
                    f"{name}: input {operand} has {len(shape)} dims {shape}, it takes {len(dims)}"
                )
            for letters, size in zip(dims, shape, strict=True):
                self._bind(name, shapes, sizes, letters, size)
        return sizes

    @staticmethod
    def _bind(
        name: str,
        shapes: tuple[Shape, ...],
        sizes: dict[str, int],
        letters: tuple[str, ...],
        size: int,
    ) -> None:
        unknown = [x for x in letters if x not in sizes]
        known = prod(sizes[x] for x in letters if x in sizes)
        if len(unknown) == 1 and known and size % known == 0:
            sizes[unknown[0]] = size // known
        elif unknown or known != size:
            listed = " and ".join(map(str, shapes))
            raise GraphError(
                f"{name}: shapes {listed} do not fit, a dim is {size} and should be {known}"
            )

    def output_shapes(self, sizes: dict[str, int]) -> tuple[Shape, ...]:
        """The shapes of the outputs."""
        unknown = [x for o in self.outputs for dim in o for x in dim if x not in sizes]
        if unknown:
            raise GraphError(
                f"no input of the op has the letter {unknown[0]!r} of its output; `sizes` gives it"
            )
        return tuple(tuple(prod(sizes[x] for x in dim) for dim in o) for o in self.outputs)

    def flops(self, sizes: dict[str, int]) -> int:
        """One operation per point of the iteration space, two where operands are contracted."""
        read = {x for o in self.inputs for dim in o for x in dim}
        written = {x for o in self.outputs for dim in o for x in dim}
        contracts = len(self.inputs) > 1 and bool(read - written)
        return (2 if contracts else 1) * prod(sizes[x] for x in self.letters)

    def signatures(
        self,
        sizes: dict[str, int],
        whole: frozenset[str],
        linear: tuple[tuple[int, ...], ...],
        reduce: str,
    ) -> tuple[Signature, ...]:
        """Every legal signature on one axis; everything B comes first."""
        found = [Signature((B,) * len(self.inputs), (B,) * len(self.outputs))]
        for letter in self.letters:
            if letter not in whole and self._splittable(letter):
                found.append(self._split(letter, sizes, reduce))
        for group in linear:
            inputs = tuple(Partial() if i in group else B for i in range(len(self.inputs)))
            found.append(Signature(inputs, (Partial(),) * len(self.outputs)))
        return tuple(dict.fromkeys(found))

    def _splittable(self, letter: str) -> bool:
        dims = [dim for o in self.inputs + self.outputs for dim in o if letter in dim]
        return all(dim[0] == letter for dim in dims)

    def _split(self, letter: str, sizes: dict[str, int], reduce: str) -> Signature:
        def sbp(operand: tuple[tuple[str, ...], ...], missing: Sbp) -> Sbp:
            for index, dim in enumerate(operand):
                if letter in dim:
                    return S(index, prod(sizes[x] for x in dim[1:]))
            return missing

        return Signature(
            tuple(sbp(o, B) for o in self.inputs),
            tuple(sbp(o, Partial(reduce)) for o in self.outputs),
        )


@cache
def parse_rule(text: str, ranks: tuple[int, ...] = ()) -> Rule:
    """The rule that a pattern means for inputs of the given numbers of dims."""
    left, _, right = text.partition("->")
    inputs, outputs = _operands(left), _operands(right)
    extra = 0
    for dims, rank in zip(inputs, ranks, strict=False):
        if ("...",) in dims:
            extra = max(extra, rank - (len(dims) - 1))
    return Rule(
        tuple(_expand(dims, extra) for dims in inputs),
        tuple(_expand(dims, extra) for dims in outputs),
    )


def _operands(side: str) -> list[tuple[tuple[str, ...], ...]]:
    if not side.strip():
        return []
    return [
        tuple(tuple((group or word).split()) for group, word in _DIM.findall(operand))
        for operand in side.split(",")
    ]


def _expand(dims: tuple[tuple[str, ...], ...], extra: int) -> tuple[tuple[str, ...], ...]:
    ellipsis = tuple((f"_{i}",) for i in range(extra))
    return tuple(letters for dim in dims for letters in (ellipsis if dim == ("...",) else (dim,)))
