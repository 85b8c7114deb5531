"""Step 4: the dtypes that tensors have. Models train in the dtypes that they are written in."""

from __future__ import annotations

from mpiflow.errors import CompileError
from mpiflow.graph.graph import Graph


def check_precision(graph: Graph) -> None:
    """Raise on variables in a dtype that is too narrow to be updated in."""
    for variable in graph.variables.values():
        if variable.trainable and variable.tensor.dtype not in ("float32", "float64"):
            raise CompileError(
                f"variable {variable.name} is {variable.tensor.dtype}; variables that train are"
                f" float32 or float64\n  {variable.tensor.where}"
            )
