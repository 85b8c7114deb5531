"""Seconds: roofline for compute, alpha-beta for communication, latency + bandwidth for input."""

from __future__ import annotations

from math import ceil, log2, prod

from mpiflow.compiler.machine import Machine
from mpiflow.graph.op import Op
from mpiflow.graph.rule import Shape
from mpiflow.plan.slice import itemsize


def compute_bytes(
    op: Op, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtypes: tuple[str, ...]
) -> int:
    """Bytes that a kernel reads and writes; `dtypes` are those of inputs then outputs."""
    shapes = op.touched(inputs, outputs)
    return sum(prod(s) * itemsize(d) for s, d in zip(shapes, dtypes, strict=True))


def compute_seconds(machine: Machine, flops: int, nbytes: int, dtype: str) -> float:
    """A kernel: launch, then the slower of arithmetic and memory."""
    return machine.launch + max(flops / machine.peak(dtype), nbytes / machine.memory)


def op_seconds(
    machine: Machine,
    op: Op,
    inputs: tuple[Shape, ...],
    outputs: tuple[Shape, ...],
    dtypes: tuple[str, ...],
) -> float:
    """A kernel of `op` on local shapes."""
    nbytes = compute_bytes(op, inputs, outputs, dtypes)
    return compute_seconds(machine, op.flops(inputs, outputs), nbytes, dtypes[-1])


def collective_seconds(machine: Machine, kind: str, nbytes: int, members: int) -> float:
    """A collective on a tensor of `nbytes`, joint over its `members`.

    Thakur, Rabenseifner, Gropp 2005: L latencies, L = ceil(log2 p), twice that for all_reduce and
    p - 1 for all_to_all; each byte leaves (p-1)/p of the tensor, twice for all_reduce, and
    (p-1)/p^2 for all_to_all. Reductions add a pass over memory.
    """
    if members == 1:
        return 0.0
    share = (members - 1) / members
    rounds = ceil(log2(members))
    reducing = share * nbytes / machine.memory
    match kind:
        case "all_reduce":
            cost = 2 * rounds * machine.latency + 2 * share * nbytes / machine.link + reducing
        case "reduce_scatter":
            cost = rounds * machine.latency + share * nbytes / machine.link + reducing
        case "all_gather":
            cost = rounds * machine.latency + share * nbytes / machine.link
        case _:
            cost = (members - 1) * machine.latency + share * nbytes / members / machine.link
    return machine.call + cost


def read_seconds(machine: Machine, nbytes: int) -> float:
    """Reading a rank's rows of a batch."""
    return machine.read_latency + nbytes / machine.storage


def rounded(seconds: float) -> float:
    """Four digits: prices in a plan must not hang on the last bit of a machine's arithmetic."""
    return float(f"{seconds:.3e}")
