"""What the declaration of an op must satisfy before it can be used, checked once, by `@op`."""

from __future__ import annotations

import re

from mpiflow.errors import GraphError
from mpiflow.graph.rule import Rule, parse_rule

_OPERAND = re.compile(r"(\s*(\.\.\.|[A-Za-z]\w*|\(\s*[A-Za-z]\w*(\s+[A-Za-z]\w*)*\s*\)))*\s*")
REDUCTIONS = ("sum", "max")
PRECISIONS = ("high", "low", "follow", "any")


def check_rule(name: str, text: str) -> Rule:
    """The parsed rule; GraphError says what in it cannot be read."""
    sides = text.split("->")
    if len(sides) != 2:
        raise _refused(name, text, "it has inputs, one '->' and outputs")
    for operand in (part for side in sides for part in side.split(",")):
        if not _OPERAND.fullmatch(operand):
            raise _refused(name, text, f"{operand.strip()!r} is not letters, '...' and (groups)")
        letters = re.findall(r"\w+|\.\.\.", operand)
        twice = [x for x in letters if letters.count(x) > 1]
        if twice:
            raise _refused(name, text, f"{twice[0]!r} is twice in {operand.strip()!r}")
    return parse_rule(text)


def check_linear(name: str, rule: Rule, linear: tuple[tuple[int, ...], ...]) -> None:
    """Raise where a linear group names an input that the rule does not have."""
    for group in linear:
        if not isinstance(group, tuple) or any(not 0 <= i < len(rule.inputs) for i in group):
            raise GraphError(
                f"op {name}: linear = {linear!r} holds groups of inputs, such as ((0,), (1,));"
                f" its rule has {len(rule.inputs)}"
            )


def check_inplace(name: str, rule: Rule, pairs: tuple[tuple[int, int], ...]) -> None:
    """Raise where a pair names an input or an output that the rule does not have."""
    for pair in pairs:
        known = isinstance(pair, tuple) and len(pair) == 2
        if not known or pair[0] not in range(len(rule.inputs)) or pair[1] not in range(
            len(rule.outputs)
        ):  # fmt: skip
            raise GraphError(
                f"op {name}: inplace = {pairs!r} holds pairs (input, output), such as ((0, 0),);"
                f" its rule has {len(rule.inputs)} inputs and {len(rule.outputs)} outputs"
            )


def check_whole(name: str, rule: Rule, whole: str) -> None:
    """Raise where a letter that cannot be split is none of the rule's."""
    unknown = sorted(set(whole.split()) - set(rule.letters))
    if unknown:
        raise GraphError(f"op {name}: whole = {whole!r}, but its rule has no letter {unknown[0]!r}")


def check_word(name: str, what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the known words."""
    if value not in known:
        raise GraphError(f"op {name}: {what} = {value!r} is none of {', '.join(known)}")


def _refused(name: str, text: str, why: str) -> GraphError:
    return GraphError(
        f"op {name}: rule = {text!r} cannot be read: {why}; an example is"
        " '... m k, ... k n -> ... m n'"
    )
