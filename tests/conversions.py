"""Plans of one program that convert a tensor to other layouts, and what ranks have of it then."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jobs import classifier_plan
from op_harness import join, parts

from mpiflow.compiler import boxing
from mpiflow.compiler.bucket import bucket
from mpiflow.compiler.build import Builder
from mpiflow.compiler.lower import in_phases
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.memory import plan_memory
from mpiflow.compiler.schedule import schedule
from mpiflow.exec.arena import Arena
from mpiflow.exec.bind import Binder
from mpiflow.exec.device import Cpu
from mpiflow.exec.engine import Engine
from mpiflow.exec.local import run_local
from mpiflow.exec.segments import InlineStream
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, P, Partial, S, layout_text
from mpiflow.ops import Fill
from mpiflow.ops.reduction import ReduceSum
from mpiflow.plan.records import Output, Plan, Program
from mpiflow.plan.traffic import bytes_sent
from mpiflow.plan.verify import verify

MACHINE = find_machine("cpu")
MAX = Partial("max")


def layouts(mesh, shape, *, more=(MAX,)):
    """All legal layouts of a tensor on a mesh."""
    choices = [B, P, *(S(d) for d in range(len(shape))), *more]
    return [
        layout for layout in product(choices, repeat=len(mesh.axes))
        if boxing.is_legal(layout, shape, mesh)
    ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A plan that makes a source and converts it; what each rank has of the source, and targets."""

    plan: Plan
    source: tuple
    targets: dict[str, tuple]  # layouts by the name of the register
    held: dict[tuple[int, ...], np.ndarray]


def conversion(source, targets, shape, dtype, mesh):
    """A plan of one program: make the source, convert it, use the targets; in a loop if in time."""
    build = Builder(mesh, MACHINE, loop=1, loops=1) if mesh.timed else Builder(mesh, MACHINE)
    made = build.register("source", shape, dtype, source)
    build.compute("make", Fill(shape, 1, dtype), [], [made], "test.py:1")
    names, outputs = {}, []
    for i, target in enumerate(targets):
        converted = build.convert(made, target, "test.py:2")
        names[converted.name] = target
        everywhere = (B,) * len(mesh.axes)
        summed = (P, *everywhere[1:]) if mesh.timed else everywhere
        scalar = build.register(f"scalar{i}", (), dtype, summed)
        every = tuple(range(len(shape)))
        build.compute(f"use{i}", ReduceSum(every), [converted], [scalar], "test.py:3")
        value = build.convert(scalar, everywhere, "test.py:4")
        outputs.append(Output(f"value{i}", value.name))
    registers = tuple(build.registers.values())
    program = Program("evaluate", mesh.micro_batches, registers, tuple(build.tasks), (),
                      tuple(outputs), micro_batches=mesh.micro_batches)  # fmt: skip
    program = in_phases(program) if mesh.timed else program
    program = schedule(bucket(program, mesh, MACHINE))
    packed = plan_memory((), (program,))
    initialise = Program("initialise", 0, (), (), ())
    plan = replace(
        classifier_plan("data=1"), mesh=Mesh(mesh.axes[mesh.timed :]), variables=(), data=(),
        arenas=(("host", packed.nbytes),), programs=(initialise, *packed.programs),
    )  # fmt: skip
    verify(plan)
    if mesh.timed:
        names = {f"{n}#{i}": x for n, x in names.items() for i in range(mesh.micro_batches)}
    return plan, names


def cases_of(groups, whole, mesh):
    """A case for each (source, targets), with random parts of sums."""
    draw = np.random.default_rng(len(groups))
    found = []
    for source, targets in groups:
        plan, names = conversion(source, targets, whole.shape, whole.dtype.name, mesh)
        held = parts(whole, source, mesh.sizes, draw)
        found.append(Case(plan, source, names, held))
    return found


def groups_of(transport, cases):
    """Collective. The communicators that any of the cases needs."""
    rank = cases[0].plan.slice(transport.rank)
    named = dict.fromkeys(axis for case in cases for axis in case.plan.communicators())
    return {axis: transport.group(rank.members(axis), axis) for axis in named}


def execute(transport, groups, case, *, shared=False):
    """Collective. (what this rank has of each target in the end, the bytes that it sent).

    Where the arena is `shared`, ranks of one host convert in its memory.
    """
    plan = case.plan
    program = plan.program("evaluate")
    arena = Arena(Cpu(), dict(plan.arenas)["host"])
    if shared:
        arena.share(transport, [(0, arena.nbytes)])
    arena.scratch(0, arena.nbytes).fill(0xFF)  # NaN, where anything is read that was not written
    rank = plan.slice(transport.rank, program)
    binder = Binder(program, plan.tensors(program), rank, plan.mesh, {"": arena}, groups,
                    {}, lambda _: None, polled=transport.polled)  # fmt: skip
    views, found = binder.views(0), {}

    class Conversions(InlineStream):
        """Puts in what is converted, and takes out what that gives."""

        def submit(self, segment, after=()):
            for task, call in zip(segment.tasks, segment.calls, strict=True):
                if task.name.startswith("use"):
                    found[task.inputs[0]] = views[task.inputs[0]].copy()
                elif task.name.startswith("make"):
                    where = rank.mesh.coordinates(transport.rank, task.micro)
                    np.copyto(views[task.outputs[0]], case.held[where])
                elif not task.name.startswith("scalar"):
                    call()
            self.done += 1

    step = binder.step(0)
    step.kernels.use(Conversions())
    before = sum(group.sent for group in groups.values())
    Engine(transport).run(step.lanes, program.name, 0)
    arena.unshare(transport)
    return found, sum(group.sent for group in groups.values()) - before


def check(case, whole, results):
    """The targets of a case join to the whole; `results` are those of `execute`, by rank."""
    mesh = case.plan.mesh_of(case.plan.program("evaluate"))
    for name, target in case.targets.items():
        what = f"{whole.shape} {layout_text(case.source)} to {layout_text(target)} on {mesh}"
        base, _, micro = name.partition("#")
        held = {
            mesh.coordinates(rank, int(turn or 0)): found[f"{base}#{turn}" if turn else base]
            for turn in (map(str, range(mesh.micro_batches)) if micro else ("",))
            for rank, (found, _) in enumerate(results)
        }
        joined = join(held, whole.shape, whole.dtype.name, target, mesh.sizes)
        np.testing.assert_allclose(joined, whole, rtol=1e-12, atol=1e-12, err_msg=what)
    sent = max(nbytes for _, nbytes in results)
    assert sent == bytes_sent(case.plan, case.plan.program("evaluate")), layout_text(case.source)


def check_groups(groups, shape, dtype, mesh):
    """Convert each source to its targets, on a thread for each rank."""
    whole = np.random.default_rng(len(groups)).integers(-50, 50, shape).astype(dtype)
    cases = cases_of(groups, whole, mesh)

    def work(transport):
        communicators = groups_of(transport, cases)
        return [execute(transport, communicators, case) for case in cases]

    results = run_local(mesh.size, work)
    for i, case in enumerate(cases):
        check(case, whole, [found[i] for found in results])


def check_all(found, shape, dtype, mesh):
    """Every pair of these layouts, each in a plan of its own."""
    check_groups([(a, [b]) for a, b in product(found, found)], shape, dtype, mesh)
