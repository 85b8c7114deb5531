"""How the elements of a tensor are arranged in a variable: "o i -> i o", "(r h d) i -> i (h r d)".

A letter is a dim, letters in parentheses are one dim that they make up, the first one outermost;
left of the arrow stand the dims of the file, right of it ours. Where several tensors make one
variable, they lie side by side along the letter `join`, each with its own size of it:

    query (h d) i, key (h d) i, value (h d) i      with r = 1, 1, 1      ->  i (h r d)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box

Shape = tuple[int, ...]
Letters = tuple[str, ...]
Dims = tuple[Letters, ...]
Sizes = dict[str, int]
Read = Callable[[int, Box], np.ndarray]
"""Gives the part of a tensor, by its number."""

_DIM = re.compile(r"\(([a-z ]+)\)|([a-z])")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The dims of a tensor and those of the variable, in letters."""

    theirs: Dims
    ours: Dims

    def sizes(self, shapes: Sequence[Shape], known: Sizes, join: str, parts: Shape) -> list[Sizes]:
        """The size of every letter in each tensor; CheckpointError where they do not fit."""
        each = [dict(known) for _ in shapes]
        if join:
            each = [known | {join: part} for part in parts]
        for sizes, shape in zip(each, shapes, strict=True):
            if len(shape) != len(self.theirs):
                raise CheckpointError(f"shape {shape} has not {len(self.theirs)} dims")
            for letters, size in zip(self.theirs, shape, strict=True):
                _infer(letters, size, sizes)
        first = {k: v for k, v in each[0].items() if k != join}
        if any({k: v for k, v in sizes.items() if k != join} != first for sizes in each):
            raise CheckpointError(f"shapes {', '.join(map(str, shapes))} do not go together")
        return each

    def shape(self, each: list[Sizes], join: str) -> Shape:
        """The shape of the variable that tensors of these sizes make."""
        whole = _whole(each, join)
        return tuple(prod(whole[x] for x in letters) for letters in self.ours)

    def read(self, each: list[Sizes], join: str, box: Box, read: Read) -> np.ndarray:
        """The part `box` of the variable. What is read is little more than that part needs."""
        whole = _whole(each, join)
        spans, cut = _spans(self.ours, whole, box)
        order = [x for letters in self.ours for x in letters]
        pieces, start = [], 0
        for number, sizes in enumerate(each):
            own = dict(spans)
            if join:
                low, high = spans[join]
                stop = start + sizes[join]
                own[join] = max(low, start) - start, min(high, stop) - start
                start = stop
            if all(low < high for low, high in own.values()):
                pieces.append(self._piece(number, sizes, own, order, read))
        joined = np.concatenate(pieces, order.index(join)) if join else pieces[0]
        grouped = joined.reshape(
            [prod(spans[x][1] - spans[x][0] for x in letters) for letters in self.ours]
        )
        return grouped[cut]

    def _piece(
        self, number: int, sizes: Sizes, spans: dict[str, tuple[int, int]], order: list[str],
        read: Read,
    ) -> np.ndarray:  # fmt: skip
        """What one tensor has of the spans of all letters, with one dim a letter, in `order`."""
        box: list[tuple[int, int]] = []
        held: dict[str, tuple[int, int]] = {}
        for letters in self.theirs:
            inner = prod(sizes[x] for x in letters[1:])
            low, high = spans[letters[0]]
            box.append((low * inner, high * inner))
            held |= {x: (0, sizes[x]) for x in letters} | {letters[0]: (low, high)}
        array = read(number, tuple(box))
        flat = [x for letters in self.theirs for x in letters]
        apart = array.reshape([held[x][1] - held[x][0] for x in flat])
        # Of the inner letters of a dim all was read.
        cut = [slice(spans[x][0] - held[x][0], spans[x][1] - held[x][0]) for x in flat]
        return apart[tuple(cut)].transpose([flat.index(x) for x in order])

    def parted(self, array: np.ndarray, each: list[Sizes], join: str) -> list[np.ndarray]:
        """The tensors that a whole variable is made of: the way back."""
        whole = _whole(each, join)
        order = [x for letters in self.ours for x in letters]
        apart = array.reshape([whole[x] for x in order])
        tensors, start = [], 0
        for sizes in each:
            piece = apart
            if join:
                piece = np.take(apart, range(start, start + sizes[join]), order.index(join))
                start += sizes[join]
            letters = [x for letters in self.theirs for x in letters]
            turned = piece.transpose([order.index(x) for x in letters])
            shape = [prod(sizes[x] for x in letters) for letters in self.theirs]
            tensors.append(turned.reshape(shape))
        return tensors

    def reversed_sizes(self, shape: Shape, known: Sizes, join: str, parts: Shape) -> list[Sizes]:
        """The sizes of the tensors that a variable of this shape is made of."""
        if len(shape) != len(self.ours):
            raise CheckpointError(f"shape {shape} has not {len(self.ours)} dims")
        whole = known | ({join: sum(parts)} if join else {})
        for letters, size in zip(self.ours, shape, strict=True):
            _infer(letters, size, whole)
        return [whole | {join: part} for part in parts] if join else [whole]


def parse_pattern(text: str) -> Pattern:
    """The pattern that a text means; CheckpointError where it means none."""
    left, arrow, right = text.partition("->")
    pattern = Pattern(_dims(left), _dims(right))
    letters = [sorted(x for dim in side for x in dim) for side in (pattern.theirs, pattern.ours)]
    if not arrow or letters[0] != letters[1] or len(set(letters[0])) < len(letters[0]):
        raise CheckpointError(
            f"pattern {text!r}: write the dims of the file, an arrow and ours, with the same"
            " letters on both sides, as in 'o i -> i o' or 'i (r h d) -> i (h r d)'"
        )
    return pattern


def _dims(text: str) -> Dims:
    dims = [tuple((group or letter).split()) for group, letter in _DIM.findall(text)]
    if _DIM.sub("", text).strip() or not all(dims):
        raise CheckpointError(f"pattern {text.strip()!r}: dims are letters, or several in ()")
    if any(len(letter) > 1 for dim in dims for letter in dim):
        raise CheckpointError(f"pattern {text.strip()!r}: put a space between letters")
    return tuple(dims)


def _infer(letters: Letters, size: int, sizes: Sizes) -> None:
    """Add the size of the one letter of a dim whose size is not known."""
    open_ = [x for x in letters if x not in sizes]
    inner = prod(sizes[x] for x in letters if x in sizes)
    if len(open_) > 1:
        raise CheckpointError(f"the sizes of {', '.join(open_)} are not given")
    if not inner or size % inner or (not open_ and size != inner):
        given = ", ".join(f"{x} = {sizes[x]}" for x in letters if x in sizes)
        raise CheckpointError(f"a dim of {size} does not go with {given}")
    if open_:
        sizes[open_[0]] = size // inner


def _whole(each: list[Sizes], join: str) -> Sizes:
    return each[0] | ({join: sum(sizes[join] for sizes in each)} if join else {})


def _spans(
    dims: Dims, sizes: Sizes, box: Box
) -> tuple[dict[str, tuple[int, int]], tuple[slice, ...]]:
    """What a box needs of every letter, and where the box lies in that."""
    spans: dict[str, tuple[int, int]] = {}
    cut = []
    for letters, (start, stop) in zip(dims, box, strict=True):
        inner = prod(sizes[x] for x in letters[1:])
        low, high = start // inner, -(-stop // inner)
        spans |= {x: (0, sizes[x]) for x in letters} | {letters[0]: (low, high)}
        cut.append(slice(start - low * inner, stop - low * inner))
    return spans, tuple(cut)
