"""How long the choice of layouts takes, without a memory limit and with half of what it then needs.

GPT training graphs of some depths on the mesh data=8,model=8 of h100 devices:

    python benchmarks/layout_search.py [LAYERS ...] [--share 0.5]

Seconds are those of the process, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
from time import process_time

import mpiflow as mf
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.fit import Limit, TooLarge, held_bytes
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.signature import choose
from mpiflow.compiler.trace import trace
from mpiflow.graph.graph import Graph
from mpiflow.graph.mesh import parse_mesh
from mpiflow.models.gpt import GPT
from mpiflow.plan.records import DataSet, Field
from mpiflow.plan.text import size_text

MESH, MACHINE, BATCH = "data=8,model=8", "h100", 64


def training_graph(layers: int) -> Graph:
    """A step of a decoder of width 2048 with AdamW and clipping, a row of 1024 tokens a rank."""
    decoder = GPT(layers, 2048, 16)
    job = mf.Job(
        "gpt",
        lambda batch: {"loss": decoder.loss(batch["tokens"])},
        train=mf.Dataset("tokens", batch=BATCH),
        optimizer=mf.AdamW(lr=1e-3, weight_decay=0.1, clip=1.0, groups=(mf.NO_DECAY,)),
    )
    fields = (Field("tokens", (decoder.context + 1,), "int32"),)
    data = DataSet("train", "tokens", fields, (), 10**6, BATCH, False, 0, 4, 4, "")
    graph = trace(job, data, name="train", rows=BATCH, training=True)
    differentiate(graph, job.optimizer)
    return graph


def row(layers: int, share: float) -> str:
    """A line of the table."""
    graph, mesh, machine = training_graph(layers), parse_mesh(MESH), find_machine(MACHINE)
    began = process_time()
    free = choose(graph, mesh, machine)
    chosen = process_time()
    held = held_bytes(free)
    limit = Limit(share * held, free=True, zero=3)
    counted = process_time()
    try:
        found = choose(graph, mesh, machine, limit=limit)
    except TooLarge as error:
        result = f"smallest found: {size_text(round(error.least))} | |"
    else:
        gap = (found.seconds - found.lower) / found.seconds
        result = f"{size_text(round(held_bytes(found)))} | {found.seconds:.4g} s | {gap:.3%}"
    ended = process_time()
    return (
        f"| {layers} | {len(free.nodes)} | {chosen - began:.1f} s | {size_text(round(held))}"
        f" | {free.seconds:.4g} s | {ended - counted:.1f} s | {result} |"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("layers", nargs="*", type=int, default=[12, 48, 96])
    options.add_argument("--share", type=float, default=0.5)
    given = options.parse_args()
    print(f"# Choosing layouts: GPT, mesh {MESH} of {MACHINE}\n")
    print(f"Limit: {given.share:.0%} of what the fastest layouts hold. CPU seconds, one core.\n")
    print("| layers | nodes | free | holds | predicted | limited | holds | predicted | gap |")
    print("|---|---|---|---|---|---|---|---|---|")
    for layers in given.layers or [12, 48, 96]:
        print(row(layers, given.share), flush=True)


if __name__ == "__main__":
    main()
