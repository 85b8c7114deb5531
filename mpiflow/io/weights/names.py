"""From our names to those of others: which tensors make a variable, and how.

A map is TOML, or JSON of the same shape:

    ignore = ["*.num_batches_tracked"]            # tensors of theirs that nobody needs
    prefixes = ["transformer.", ""]               # before all names of theirs: the first that fits

    [names]                                       # ours = theirs; a * stands for the same text
    "tokens.weight" = "wte.weight"
    "fc.weight" = {from = "fc.weight", as = "o i -> i o"}
    "block*.norm.scale" = ["h.*.ln.weight", "h.*.ln.gamma"]               # either of the two
    "block*.qkv.weight" = {from = ["h.*.q", "h.*.k", "h.*.v"], as = "(r h d) i -> i (h r d)",
                           join = "r", sizes = {h = 12}}

The first line that fits a variable counts. `pattern.py` says what `as` means; `parts` are the sizes
of the letter `join`, by default 1 for each tensor.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from mpiflow.errors import CheckpointError
from mpiflow.io.weights.pattern import parse_pattern
from mpiflow.plan.first import Filled


@dataclass(frozen=True, slots=True)
class Rule:
    """Variables of this name are made of tensors of these names."""

    ours: str
    theirs: tuple[str, ...]
    pattern: str = ""
    join: str = ""
    parts: tuple[int, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    def filled(self, variable: str, stars: tuple[str, ...], prefix: str) -> Filled:
        """The rule for one variable; `stars` is what its stars stand for."""
        tensors = tuple(prefix + starred(name, stars) for name in self.theirs)
        return Filled(variable, tensors, self.pattern, self.join, self.parts, self.sizes)


@dataclass(frozen=True, slots=True)
class NameMap:
    """The rules for all variables. `name` is what messages call it.

    `heads` is the number of groups of attention heads that the rules are for, 0 for any.
    """

    name: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    heads: int = 0

    def candidates(self, variable: str) -> list[Filled]:
        """What may fill a variable, in the order in which to look for it."""
        ours = next((r.ours for r in self.rules if match(r.ours, variable) is not None), None)
        rules = [rule for rule in self.rules if rule.ours == ours]
        stars = match(ours, variable) if ours is not None else None
        if stars is None:
            return []
        return [rule.filled(variable, stars, prefix) for prefix in self.prefixes for rule in rules]

    def ignores(self, tensor: str) -> bool:
        """Whether nobody needs this tensor of theirs."""
        return any(
            match(prefix + name, tensor) is not None
            for prefix in self.prefixes
            for name in self.ignore
        )


SAME = NameMap("our own names", (Rule("*", ("*",)),))


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the stars of a pattern stand for in a name, at least a character each; or None."""
    found = _expression(pattern).fullmatch(name)
    return found.groups() if found else None


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Whether a name fits one of the patterns, as a shell has them."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def starred(pattern: str, stars: tuple[str, ...]) -> str:
    """The pattern with its stars replaced."""
    first, *rest = pattern.split("*")
    return first + "".join(star + part for star, part in zip(stars, rest, strict=True))


def read_map(path: Path) -> NameMap:
    """The map in a TOML or JSON file; every entry of it is checked."""
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: the name map cannot be read: {problem}") from problem
    known = {"names", "ignore", "prefixes"}
    if not isinstance(content, dict) or set(content) - known or "names" not in content:
        raise CheckpointError(f"{path}: a name map has {', '.join(sorted(known))}")
    if not isinstance(content["names"], dict):
        raise CheckpointError(f"{path}: names is a table, ours = theirs")
    rules: list[Rule] = []
    for ours, theirs in content["names"].items():
        for one in theirs if isinstance(theirs, list) else [theirs]:
            rules.append(_rule(ours, one, f"{path}: {ours!r}"))
    ignore = _texts(content.get("ignore", []), f"{path}: ignore")
    prefixes = _texts(content.get("prefixes", [""]), f"{path}: prefixes")
    return NameMap(str(path), tuple(rules), ignore, prefixes)


def _rule(ours: str, theirs: Any, where: str) -> Rule:
    row = {"from": theirs} if isinstance(theirs, str) else theirs
    if not isinstance(row, dict) or set(row) - {"from", "as", "join", "parts", "sizes"}:
        raise CheckpointError(f"{where}: write a name, or {{from = ..., as = ...}}, not {theirs!r}")
    given = row.get("from")
    names = _texts([given] if isinstance(given, str) else given, f"{where}: from")
    if not names or any(name.count("*") != ours.count("*") for name in names):
        raise CheckpointError(f"{where}: every name of theirs has as many * as ours")
    join, pattern = row.get("join", ""), row.get("as", "")
    parts, sizes = row.get("parts", [1] * len(names) if join else []), row.get("sizes", {})
    if not isinstance(pattern, str) or not isinstance(join, str) or not isinstance(sizes, dict):
        raise CheckpointError(f"{where}: as and join are text, sizes a table of numbers")
    if not isinstance(parts, list) or any(type(n) is not int or n < 1 for n in
                                          (*parts, *sizes.values())):  # fmt: skip
        raise CheckpointError(f"{where}: parts and sizes are whole numbers from 1")
    try:
        return checked(Rule(ours, names, pattern, join, tuple(parts), tuple(sizes.items())))
    except CheckpointError as problem:
        raise CheckpointError(f"{where}: {problem}") from None


def checked(rule: Rule) -> Rule:
    """The rule, if its parts go together."""
    letters = {x for dim in parse_pattern(rule.pattern).ours for x in dim} if rule.pattern else ()
    if len(rule.theirs) > 1 and not rule.join:
        raise CheckpointError("several tensors are joined along a letter; name it: join = 'r'")
    if rule.join and (rule.join not in letters or len(rule.parts) != len(rule.theirs)):
        raise CheckpointError(
            f"join = {rule.join!r} is a letter of the pattern, with a part for each tensor"
        )
    return rule


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{where} is a list of names, not {value!r}")
    return tuple(value)
