"""How kernels are run in tests: `mpiflow.testing.kernels`, under the name that tests know."""

from mpiflow.testing.kernels import (  # noqa: F401
    call,
    evaluate,
    join,
    parts,
    poisoned,
    sharded,
    whole,
    workspace,
)
