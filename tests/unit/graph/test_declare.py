"""What a declaration of an op must be, where ops of the user's own come from, and their digests."""

import ast
import importlib.util
import sys

import pytest

from mpiflow.errors import GraphError, PlanError
from mpiflow.graph.op import REGISTRY, build_op
from mpiflow.graph.source import used_lines

HEAD = """import mpiflow as mf

FACTOR = 2.0
OTHER = 1.0


def double(x):
    return FACTOR * x


"""
OP = """@mf.op
class Twice(mf.Op):
    rule = "... -> ..."

    def kernel(self, shard, out, x):
        out[...] = double(x)
"""


@pytest.fixture
def load(tmp_path):
    """Runs a file as a module; the registry is afterwards as it was."""
    known = dict(REGISTRY)

    def load(text, name="mine", folder="", module=None):
        path = tmp_path / folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(module or f"loaded_{name}", path)
        made = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = made
        spec.loader.exec_module(made)
        return made

    yield load
    REGISTRY.clear()
    REGISTRY.update(known)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mf.Op)", "object)", "op Twice is no subclass of Op"),
        ("def kernel", "def kernels", "op Twice has no kernel; write `def kernel"),
        ("... -> ...", "... ...", r"rule = '... ...' cannot be read: it has inputs, one '->'"),
        ("... -> ...", "n c -> (n c", r"'\(n c' is not letters"),
        ("... -> ...", "n n -> n", "'n' is twice in 'n n'"),
        ('"... -> ..."', '"... -> ..."\n    whole = "c"', "whole = 'c', but its rule has no"),
        ('"... -> ..."', '"... -> ..."\n    linear = ((1,),)', r"holds groups of inputs, .* has 1"),
        ('"... -> ..."', '"... -> ..."\n    linear = (0,)', "holds groups of inputs"),
        ('"... -> ..."', '"... -> ..."\n    inplace = ((0, 1),)', "1 inputs and 1 outputs"),
        ('"... -> ..."', '"... -> ..."\n    reduce = "min"', "reduce = 'min' is none of sum, max"),
        ('"... -> ..."', '"... -> ..."\n    precision = "half"', "precision = 'half' is none of"),
        (
            OP,
            f"def make():\n    {OP.replace(chr(10), chr(10) + '    ')}\nmake()",
            "inside a functi",
        ),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused(load, old, new, message):
    with pytest.raises(GraphError, match=message):
        load(HEAD + OP.replace(old, new))


def test_an_op_is_written_in_a_file():
    with pytest.raises(GraphError, match="op Twice is written in no file"):
        exec(HEAD + OP, {"__name__": "nowhere"})


def test_an_op_of_the_users_is_named_by_its_file_and_takes_no_built_in_ones_place(load):
    module = load(HEAD + OP.replace("Twice", "Relu"))
    assert REGISTRY["mine.Relu"] is module.Relu
    assert REGISTRY["Relu"].source is None
    assert build_op("mine.Relu", {}).name == "mine.Relu"


def test_a_file_loaded_again_gives_its_ops_anew_and_two_of_one_name_clash(load):
    load(HEAD + OP)
    again = load(HEAD + OP, module="imported_under_another_name")
    assert REGISTRY["mine.Twice"] is again.Twice
    with pytest.raises(GraphError, match=r"named mine.Twice is registered already from .*mine.py"):
        load(HEAD + OP, folder="other", module="a_third")


def test_an_op_that_is_not_loaded_says_where_it_is():
    with pytest.raises(
        PlanError, match=r"'else.Twice' .* in a user's else.py, to be named with --ops"
    ):
        build_op("else.Twice", {})


def digest(load, text):
    return load(text).Twice.source.digest


def test_the_digest_covers_what_the_class_uses_of_its_file_and_nothing_else(load):
    first = digest(load, HEAD + OP)
    assert digest(load, f"# a note\n{HEAD}\ndef job():\n    pass\n\n\n{OP}") == first
    assert digest(load, (HEAD + OP).replace("OTHER = 1.0", "OTHER = 3.0")) == first
    assert digest(load, (HEAD + OP).replace("FACTOR = 2.0", "FACTOR = 3.0")) != first
    assert digest(load, (HEAD + OP).replace("out[...] =", "out[:] =")) != first


def test_names_are_followed_through_imports_branches_and_decorators():
    text = """import os
try:
    import fast as np
except ImportError:
    import numpy as np
if os:
    def helper(): return np
unused = 1
@deco
class A(B):
    pass
def deco(c): return helper()
B = object
"""
    assert [first for first, _ in used_lines(ast.parse(text), "A")] == [1, 2, 6, 9, 12, 13]
