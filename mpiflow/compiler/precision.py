"""Step 4: the dtypes that tensors have.

A job in float16 or bfloat16 is cast by class of op while it is traced and differentiated, so that
each cast is a node of the graph and a line of the plan: products and convolutions take 16-bit
inputs, sums, norms, losses and updates take float32, and what moves or combines values follows its
inputs. Variables stay float32 and are cast where they are read; so their gradients come back as
float32.
"""

from __future__ import annotations

from mpiflow.errors import CompileError
from mpiflow.graph.graph import Graph
from mpiflow.graph.op import Op
from mpiflow.graph.tensor import Tensor, is_float, is_narrow
from mpiflow.ops.base import Tensors
from mpiflow.ops.shape import cast

FULL = "float32"


class Mixed:
    """The policy of a graph in 16-bit precision; a tensor is cast once for all its consumers."""

    def __init__(self, narrow: str) -> None:
        self.narrow = narrow
        self._cast: dict[Tensor, Tensor] = {}

    def __call__(self, op: Op, inputs: Tensors) -> Tensors:
        """The inputs in the dtypes that the op takes."""
        floats = {t.dtype for t in inputs if is_float(t.dtype)}
        if op.precision == "any" or not floats:
            return inputs
        if "float64" in floats:  # the sums of a batch norm, or what the user computes in it
            return tuple(self._as(t, FULL) if is_narrow(t.dtype) else t for t in inputs)
        wanted = self._wanted(op, inputs)
        return tuple(self._as(t, wanted) if is_float(t.dtype) else t for t in inputs)

    def _wanted(self, op: Op, inputs: Tensors) -> str:
        if op.precision != "follow":
            return self.narrow if op.precision == "low" else FULL
        # A bias follows what it is added to.
        made = {t.dtype for t in inputs if is_float(t.dtype) and t.node is not None}
        return FULL if FULL in made or not made else self.narrow

    def _as(self, tensor: Tensor, dtype: str) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        if tensor not in self._cast or self._cast[tensor].dtype != dtype:
            self._cast[tensor] = cast(tensor, dtype)
        return self._cast[tensor]


def check_precision(graph: Graph) -> None:
    """Raise on variables in a dtype that is too narrow to be updated in."""
    for variable in graph.variables.values():
        if variable.trainable and is_narrow(variable.tensor.dtype):
            raise CompileError(
                f"variable {variable.name} is {variable.tensor.dtype}; variables that train are"
                f" float32 or float64; a job trains in 16 bits by precision="
                f"{variable.tensor.dtype!r}\n  {variable.tensor.where}"
            )
