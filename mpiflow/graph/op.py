"""Op: a kind of computation, declared once in one class.

A subclass states its index rule (shapes, signatures, flops), and has `grad` and `kernel` below
it. `@op` makes it a frozen dataclass, so that its fields are its attributes, and records its name,
which is what a plan stores: `Relu` for one of mpiflow's own, `FILE.Swish` for one of a user's
FILE.py, so that these never take each other's place.

The contract of a kernel: it writes `out` (a tuple where there are several), reads its arrays, its
attributes, `shard.xp`, `shard.start(operand, dim)` and `shard.work`; it allocates nothing, never
derives a global size from a local array, works on empty spans, never talks to another rank and
never synchronises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, cast, dataclass_transform

from mpiflow.errors import GraphError, PlanError
from mpiflow.graph import declare
from mpiflow.graph.rule import Rule, Shape, Signature, parse_rule
from mpiflow.graph.source import Source, find_source
from mpiflow.graph.tensor import Tensor

OUT = "out"


class ShardView(Protocol):
    """What a kernel may know about the shard that it works on."""

    xp: Any
    work: Any
    """Scratch bytes, as many as `Op.workspace` asked for: a flat uint8 array."""

    def start(self, operand: int | str, dim: int) -> int:
        """The logical index at which `dim` of an input (or of the first output, "out") begins."""

    def first(self) -> bool:
        """Whether this rank is the first of those that hold the same part."""


class Op:
    """Base of all ops; see the module's docstring."""

    rule: ClassVar[str] = ""
    whole: ClassVar[str] = ""
    """Letters that cannot be split."""
    linear: ClassVar[tuple[tuple[int, ...], ...]] = ()
    """Groups of inputs in which the op is linear: partial sums may pass through."""
    reduce: ClassVar[str] = "sum"
    """How the outputs combine over a split letter that they lost."""
    inplace: ClassVar[tuple[tuple[int, int], ...]] = ()
    """Pairs (input, output) that may share memory."""
    view: ClassVar[bool] = False
    """Whether the output is the input byte for byte: then it may share its memory in any shape,
    and the kernel of one that does has nothing to do."""
    precision: ClassVar[str] = "high"
    """In a job of 16-bit precision: "low" computes in it, "high" in float32, "follow" in what its
    inputs have, "any" takes each input as it is."""
    unit: ClassVar[str] = "vector"
    """What its operations are, for the price: "matrix", those of products, or "vector"."""
    indexes: ClassVar[tuple[tuple[int, int, int], ...]] = ()
    """(input, operand, dim): the values of `input` are indices into `dim` of `operand`."""
    source: ClassVar[Source | None] = None
    """Where it is written, if it is an op of the user's own; set by `@op`."""

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        """The rule for inputs of these shapes."""
        return parse_rule(self.rule, tuple(len(shape) for shape in shapes))

    def sizes(self) -> dict[str, int]:
        """Sizes of letters that no input has."""
        return {}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        """Letters that a signature may not split."""
        return frozenset(self.whole.split())

    def groups(self, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The linear groups for inputs of these dtypes; there are no sums of bool."""
        return tuple(group for group in self.linear if all(dtypes[i] != "bool" for i in group))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        """The dtypes of the outputs: by default one, that of the inputs, which must agree."""
        if len(set(dtypes)) > 1:
            raise GraphError(
                f"{self.name} takes inputs of one dtype, not {' and '.join(dtypes)}; cast one"
            )
        return dtypes[:1]

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        """Scratch bytes for local shapes and the dtype of the first output."""
        return 0

    def device_workspace(
        self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str
    ) -> int:
        """The same on an accelerator, where `wide_sums` is set."""
        return self.workspace(inputs, outputs, dtype)

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """The shapes of the outputs."""
        rule = self.pattern(shapes)
        return rule.output_shapes(rule.sizes(self.name, shapes, self.sizes()))

    def signatures(
        self, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]
    ) -> tuple[Signature, ...]:
        """Every legal signature on one mesh axis."""
        rule = self.pattern(shapes)
        sizes = rule.sizes(self.name, shapes, self.sizes())
        return rule.signatures(sizes, self.unsplittable(rule), self.groups(dtypes), self.reduce)

    def by_owner(self, shapes: tuple[Shape, ...]) -> tuple[Signature, ...]:
        """Signatures on one axis that take rows to and from the ranks that have them of a table.

        They hold with a message of its own kind before the kernel, or instead of it; see
        `compiler.owners`.
        """
        return ()

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        """Operations on local shapes."""
        rule = self.pattern(inputs)
        sizes: dict[str, int] = {}
        operands = zip(rule.inputs + rule.outputs, inputs + outputs, strict=True)
        for dims, shape in operands:
            for letters, size in zip(dims, shape, strict=True):
                sizes.update(dict.fromkeys(letters[1:], 1))
                sizes[letters[0]] = size
        return rule.flops(sizes)

    def limits(self, shapes: tuple[Shape, ...]) -> tuple[tuple[int, int], ...]:
        """(input, n): the values of `input` are indices below n; shapes are of inputs, outputs."""
        return tuple((operand, shapes[of][dim]) for operand, of, dim in self.indexes)

    def touched(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """What a kernel reads and writes of its inputs and outputs, for the price."""
        return inputs + outputs

    def copied(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        """Elements that the kernel writes and reads besides, in workspace larger than caches."""
        return 0

    def grad(
        self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], dys: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradient of each input, or None where there is none."""
        raise GraphError(
            f"{self.name} has no gradient, and variables that train come before it; "
            + ("write its `grad`" if self.source else "mf.stop_gradient(x) holds them back")
        )

    def abreast(self) -> tuple[tuple[range, ...], tuple[range, ...]]:
        """Ranges of inputs, and of outputs, that are better one array each: none, as a rule.

        All are of one length, that of the tensors that the op does the same to. Where some of these
        lie side by side in every range, `joined` does the same to them as flat arrays. The first
        range of inputs is of what is updated, the second of its gradients. The kernel asks for no
        `shard.start`, as operands move.
        """
        return (), ()

    def joined(self, members: int) -> Op:
        """The op for so many tensors in each range of `abreast`."""
        raise NotImplementedError(self.name)

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        """Compute on arrays; see the contract above."""
        raise NotImplementedError(self.name)

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        """The call that every step makes; ops whose kernel is one array function give just that."""
        return partial(self.kernel, shard, out, *arrays)

    @property
    def name(self) -> str:
        """The registered name."""
        return registered_name(type(self))

    def attributes(self) -> dict[str, Any]:
        """The attributes as plain data; those that have their default are left out."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        }


REGISTRY: dict[str, type[Op]] = {}
_PACKAGE = __name__.partition(".")[0]
OpClass = TypeVar("OpClass", bound=type[Op])


@dataclass_transform(frozen_default=True)
def op(cls: OpClass) -> OpClass:
    """Register an op class and make it a frozen dataclass; GraphError where it is badly declared.

    An op of the user's own is known by the name of its file and its own. A file that is loaded
    again gives its ops anew; two files of one name cannot both have an op of one name.
    """
    _check(cls)
    frozen = cast(OpClass, dataclasses.dataclass(frozen=True)(cls))
    if cls.__module__.partition(".")[0] != _PACKAGE:
        frozen.source = find_source(frozen)
    name = registered_name(frozen)
    known = REGISTRY.get(name)
    if known is not None and not _same_file(known, frozen):
        origin = f" from {known.source.file}" if known.source else ""
        raise GraphError(f"an op named {name} is registered already{origin}; rename one")
    REGISTRY[name] = frozen
    return frozen


def registered_name(cls: type[Op]) -> str:
    """The class's name; with that of its file before it if it is of the user's own."""
    return f"{cls.source.module}.{cls.__name__}" if cls.source else cls.__name__


def _same_file(known: type[Op], again: type[Op]) -> bool:
    """Whether a file was loaded again, or another took its place among the modules."""
    if known.source is None or again.source is None:
        return False
    return known.source.file == again.source.file or known.__module__ == again.__module__


def _check(cls: type[Op]) -> None:
    name = cls.__name__
    if not issubclass(cls, Op):
        raise GraphError(f"op {name} is no subclass of Op; write `class {name}(mf.Op)`")
    if cls.kernel is Op.kernel and cls.bind is Op.bind:
        raise GraphError(f"op {name} has no kernel; write `def kernel(self, shard, out, *arrays)`")
    declare.check_word(name, "reduce", cls.reduce, declare.REDUCTIONS)
    declare.check_word(name, "precision", cls.precision, declare.PRECISIONS)
    if cls.pattern is not Op.pattern:
        return  # what it makes depends on shapes
    rule = declare.check_rule(name, cls.rule)
    declare.check_whole(name, rule, cls.whole)
    declare.check_linear(name, rule, cls.linear)
    declare.check_inplace(name, rule, cls.inplace)


def build_op(name: str, attributes: Mapping[str, Any]) -> Op:
    """The op that a plan names."""
    cls = REGISTRY.get(name)
    if cls is None:
        module, dot, _ = name.rpartition(".")
        advice = f"; it is in a user's {module}.py, to be named with --ops" if dot else ""
        raise PlanError(f"the plan uses an op {name!r} that this mpiflow does not have{advice}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(attributes) - set(fields))
    if unknown:
        raise PlanError(f"op {name} has no attribute {unknown[0]!r}")
    return cls(**{key: _frozen(value) for key, value in attributes.items()})


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
