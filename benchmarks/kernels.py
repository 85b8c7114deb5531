"""Kernels against PyTorch's on one thread: forward, and forward with backward.

    python benchmarks/kernels.py [PAIRS] [NAME ...]

Each case is a function of arrays. Ours is traced, differentiated and bound as a plan binds it, on
arrays made beforehand; theirs runs eagerly. Both run in turn, PAIRS times each (30 unless said);
medians of the thread's CPU time are printed, which other load on the machine disturbs little, and
the median of the pairs' ratios. OMP_NUM_THREADS=1 is set before NumPy is imported.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from mpiflow import ops
from mpiflow.exec.bind import Shard
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, Node, building
from mpiflow.graph.op import OUT
from mpiflow.graph.tensor import Tensor

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Case:
    """One function of arrays, in mpiflow's ops and in PyTorch's."""

    name: str
    ours: Callable[..., Tensor]
    theirs: Callable[..., torch.Tensor]
    arrays: tuple[np.ndarray, ...]


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def ids(size: int, top: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, top, size)


def cases() -> list[Case]:
    rows, wide = floats(512, 768), floats(512, 3072)
    image, small = floats(32, 64, 28, 28), floats(64, 16, 14, 14)
    scale, shift = floats(768), floats(768)[::-1].copy()
    conv = dict(stride=1, padding=1)
    return [
        Case("linear 512x768x3072", ops.linear, lambda x, w: x @ w, (rows, floats(768, 3072))),
        Case("softmax 512x768", ops.softmax, lambda x: F.softmax(x, -1), (rows,)),
        Case("layer_norm 512x768", ops.layer_norm,
             lambda x, a, b: F.layer_norm(x, (768,), a, b), (rows, scale, shift)),
        Case("rms_norm 512x768", ops.rms_norm,
             lambda x, a: F.rms_norm(x, (768,), a, 1e-6), (rows, scale)),
        Case("gelu 512x3072", lambda x: ops.gelu(x), lambda x: F.gelu(x), (wide,)),
        Case("dropout 512x3072", lambda x: ops.dropout(x, 0.1), lambda x: F.dropout(x, 0.1),
             (wide,)),
        *(Case(f"cross_entropy {n}x{c}", ops.cross_entropy,
               lambda x, y: F.cross_entropy(x, y, reduction="none"), (floats(n, c), ids(n, c)))
          for n, c in ((64, 10), (512, 32000))),
        Case("  with smoothing 512x32000", lambda x, y: ops.cross_entropy(x, y, smoothing=0.1),
             lambda x, y: F.cross_entropy(x, y, reduction="none", label_smoothing=0.1),
             (floats(512, 32000), ids(512, 32000))),
        Case("embedding 4096 of 32000x256", ops.embedding, lambda w, i: F.embedding(i, w),
             (floats(32000, 256), ids(4096, 32000))),
        Case("conv 3x3 32x64x28x28", lambda x, w: ops.conv(x, w, **conv),
             lambda x, w: F.conv2d(x, w, **conv), (image, floats(64, 64, 3, 3))),
        Case("conv 1x1 32x64x28x28", ops.conv, F.conv2d, (image, floats(64, 64, 1, 1))),
        Case("conv depthwise 32x64x28x28", lambda x, w: ops.conv(x, w, groups=64, **conv),
             lambda x, w: F.conv2d(x, w, groups=64, **conv), (image, floats(64, 1, 3, 3))),
        Case("max_pool 2 32x64x28x28", lambda x: ops.max_pool(x, 2),
             lambda x: F.max_pool2d(x, 2), (image,)),
        Case("max_pool 3/2 32x64x28x28", lambda x: ops.max_pool(x, 3, stride=2, padding=1),
             lambda x: F.max_pool2d(x, 3, 2, 1), (image,)),
        Case("max_pool 2 64x16x14x14", lambda x: ops.max_pool(x, 2),
             lambda x: F.max_pool2d(x, 2), (small,)),
        Case("mean_pool 2 32x64x28x28", lambda x: ops.mean_pool(x, 2),
             lambda x: F.avg_pool2d(x, 2), (image,)),
    ]  # fmt: skip


Calls = list[Callable[[], Any]]


def bound(function: Callable[..., Tensor], arrays: tuple[np.ndarray, ...], *, back: bool) -> Calls:
    """The calls of a step: forward, and with `back` the gradients of all floating-point arrays."""
    graph = Graph("benchmark")
    with building(graph):
        tensors = [graph.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
        y = function(*tensors)
        dy = graph.input("dy", y.shape, y.dtype)
        graph.outputs["y"] = y
        if back:
            leaves = [t for t in tensors if t.dtype.startswith("float")]
            found = gradients(graph, ops.reduce_sum(y * dy), leaves)
            graph.outputs |= {f"d{i}": t for i, t in enumerate(found) if t is not None}
    variables = [variable.tensor for variable in graph.variables.values()]
    values = {t: np.ones(t.shape, t.dtype) for t in (*graph.inputs.values(), *variables)}
    values |= dict(zip(tensors, arrays, strict=True))
    nodes = graph.live()
    return [call for node in nodes if (call := bind(node, nodes, values, graph)) is not None]


def bind(
    node: Node, nodes: list[Node], values: dict[Tensor, np.ndarray], graph: Graph
) -> Callable[[], Any] | None:
    """The call of a node, whose outputs lie on inputs where the op allows it, as in a plan."""
    if node.op.name == "StopGradient":
        values[node.outputs[0]] = values[node.inputs[0]]
        return None
    arrays = [values[t] for t in node.inputs]
    later = {t for other in nodes[nodes.index(node) + 1 :] for t in other.inputs}
    kept = later | set(graph.outputs.values()) | {t for t in node.inputs if t.node is None}
    kept |= {t for t in values if t not in node.inputs}
    outs = [np.empty(t.shape, t.dtype) for t in node.outputs]
    for i, j in node.op.inplace:
        x = node.inputs[i]
        alone = all(values[x] is not values[t] for t in kept if t in values)
        if x not in kept and alone and (x.shape, x.dtype) == (outs[j].shape, outs[j].dtype.name):
            outs[j] = arrays[i]
            break
    values.update(zip(node.outputs, outs, strict=True))
    shapes = tuple(a.shape for a in arrays), tuple(a.shape for a in outs)
    size = node.op.workspace(*shapes, outs[0].dtype.name)
    starts = {i: (0,) * a.ndim for i, a in enumerate(arrays)} | {OUT: (0,) * outs[0].ndim}
    shard = Shard(np, np.empty(size, np.uint8), starts, True)
    return node.op.bind(shard, outs[0] if len(outs) == 1 else tuple(outs), *arrays)


def theirs(case: Case, *, back: bool) -> Callable[[], Any]:
    leaves = [torch.tensor(a, requires_grad=back and a.dtype.kind == "f") for a in case.arrays]
    dy = torch.ones_like(case.theirs(*leaves))

    def step() -> None:
        y = case.theirs(*leaves)
        if back:
            y.backward(dy)
            for leaf in leaves:
                leaf.grad = None

    return step


def measure(case: Case, pairs: int, *, back: bool) -> tuple[float, float, float]:
    """Median seconds of ours and theirs, and the median ratio of the pairs."""
    calls, other = bound(case.ours, case.arrays, back=back), theirs(case, back=back)
    times = []
    for i in range(pairs + 3):
        began = time.thread_time()
        for call in calls:
            call()
        middle = time.thread_time()
        other()
        if i >= 3:
            times.append((middle - began, time.thread_time() - middle))
    ours, others = zip(*times, strict=True)
    ratio = statistics.median(a / b for a, b in times)
    return statistics.median(ours), statistics.median(others), ratio


def main(pairs: int, names: list[str]) -> None:
    print(f"NumPy {np.__version__}, PyTorch {torch.__version__}, one thread, {pairs} pairs\n")
    print("| | forward ms | PyTorch | ratio | with backward ms | PyTorch | ratio |")
    print("|---|---|---|---|---|---|---|")
    for case in cases():
        if names and not any(name in case.name for name in names):
            continue
        cells = [case.name.strip()]
        for back in (False, True):
            ours, other, ratio = measure(case, pairs, back=back)
            cells += [f"{ours * 1e3:.3f}", f"{other * 1e3:.3f}", f"{ratio:.1f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    pairs = int(given.pop(0)) if given and given[0].isdecimal() else 30
    main(pairs, given)
