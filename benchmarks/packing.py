"""How small the packer makes an arena, and how long it takes: models, and hard public instances.

    python benchmarks/packing.py                  plans of the examples at full size
    python benchmarks/packing.py FOLDER [A ...]   instances of google/minimalloc, NAME.1048576.csv

A ratio of 1 is the largest live set, below which nothing is. Of a model, the arena counts all that
lies in it, `packed` only what takes turns: without variables, and slots of reads. An independent
check compares every pair of buffers that live at once. Seconds are CPU seconds, for all programs of
a plan. Results: benchmarks/results/packing.md.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np

from mpiflow.compiler import memory
from mpiflow.compiler.pack import Buffer, Packing, align, lower_bound, pack
from mpiflow.graph.mesh import parse_mesh
from mpiflow.jobfile import load_job
from mpiflow.planning import make_plan

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RESNET = ("images.py", ["model=resnet50", "size=224", "channels=3", "classes=1000"])
BERT, GPT = ("bert.py", ["size=large"]), ("gpt.py", ["size=medium"])
FACES = ("faces.py", ["classes=1000000"])
MODELS = {
    "resnet50": (RESNET, ["data=1", "data=64", "data=8,model=2"]),
    "bert-large": (BERT, ["data=1", "data=64", "data=8,model=4"]),
    "gpt-medium": (GPT, ["data=1", "data=64", "data=8,model=4"]),
    "faces": (FACES, ["data=1", "model=64", "data=2,model=2"]),
}
SECONDS = 60.0
CAPACITY = 1 << 20
WORK = 3_000_000_000
"""Of an instance: half of it looks for the capacity, the rest for the best above that."""


def overlap_free(buffers: Sequence[Buffer], packing: Packing) -> bool:
    """Whether no two buffers that live at once share a byte: every pair is compared."""
    begin = np.array(packing.offsets)
    end = begin + np.array([b.nbytes for b in buffers])
    start, stop = np.array([(b.start, b.stop) for b in buffers]).T
    return not any(
        ((start <= stop[i]) & (stop >= start[i]) & (begin < end[i]) & (end > begin[i]))[:i].any()
        for i in range(len(buffers))
    )


def planned(file: str, settings: list[str], mesh: str) -> None:
    """Plan a model, and print the figures of the largest program that was packed."""
    seen: list[tuple[Sequence[Buffer], Packing, float]] = []
    arenas: list[memory.Packed] = []

    def packing(buffers: Sequence[Buffer], *, enough: int) -> Packing:
        begin = time.process_time()
        found = pack(buffers, enough=enough)
        seen.append((buffers, found, time.process_time() - begin))
        return found

    def observe(step: str, program: str, result: object) -> None:
        if isinstance(result, memory.Packed):
            arenas.append(result)

    job, home = load_job(str(EXAMPLES / file), settings)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(memory, "pack", packing):
        make_plan(job, home, parse_mesh(mesh), Path(folder), observe=observe)
    buffers, found, _ = max(seen, key=lambda each: each[1].nbytes)
    apart = all(overlap_free(each, result) for each, result, _ in seen if each)
    arena = arenas[-1]
    print(
        f"{mesh:16}{len(buffers):8}{found.nbytes / 2**20:12.1f}"
        f"{found.nbytes / found.lower_bound:9.5f}"
        f"{align(arena.nbytes) / arena.lower_bound:9.5f}{sum(s for *_, s in seen):9.2f}"
        f"  {'apart' if apart else 'OVERLAP'}",
        flush=True,
    )


def solved(path: Path) -> bool:
    """Whether an instance was packed into its memory in time; print what came of it."""
    with path.open() as file:
        buffers = [
            Buffer(int(row["size"]), int(row["lower"]), int(row["upper"]) - 1)
            for row in csv.DictReader(file)
        ]
    by_orders = pack(buffers, enough=CAPACITY, work=0)
    begin = time.process_time()
    found = pack(buffers, enough=CAPACITY, work=WORK, worth=0)
    spent = time.process_time() - begin
    print(
        f"{path.name.partition('.')[0]:8}{len(buffers):8}"
        f"{lower_bound(buffers) / CAPACITY:10.4f}{by_orders.nbytes / CAPACITY:10.4f}"
        f"{found.nbytes / CAPACITY:10.4f}{spent:9.1f}"
        f"  {'apart' if overlap_free(buffers, found) else 'OVERLAP'}",
        flush=True,
    )
    return found.nbytes <= CAPACITY and spent <= SECONDS


def main(arguments: list[str]) -> None:
    """Print a table of models, or of instances."""
    if not arguments:
        print("model       mesh             buffers  packed MiB    ratio    arena  seconds")
        for name, ((file, settings), meshes) in MODELS.items():
            for mesh in meshes:
                print(f"{name:12}", end="")
                planned(file, settings, mesh)
        return
    folder, names = Path(arguments[0]), arguments[1:] or list("ABCDEFGHIJK")
    print("instance buffers  live set    orders    packed  seconds   (of the capacity)")
    fit = sum(solved(folder / f"{name}.1048576.csv") for name in names)
    print(f"{fit} of {len(names)} fit their capacity within {SECONDS:.0f} seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
