"""Step 6: which nodes run on which part of the mesh: without stages, every node on all of it."""

from __future__ import annotations

from mpiflow.errors import CompileError
from mpiflow.graph.mesh import Mesh

STAGE = "stage"


def check_stages(mesh: Mesh) -> None:
    """Raise on a mesh that asks for pipeline stages, which plans do not have yet."""
    if STAGE in mesh.names and mesh.sizes[mesh.index(STAGE)] > 1:
        raise CompileError(
            f"mesh {mesh}: pipelines over a {STAGE!r} axis are not supported by this version;"
            " name the axis otherwise to split tensors over it"
        )
