"""Pipelines of balanced stages by hand: one task for each segment, and messages between them."""

from mpiflow.compiler.pipeline import Pipeline, with_slots
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import B, S
from mpiflow.plan.records import RECEIVE, SEND, Plan, Program, Register, Settings, Task

TIMED = (S(0), B)


def balanced(
    stages, count, schedule, virtual, forward, backward, weights, hop=0.0, *, trained=True, ahead=0
):
    """A plan whose stages take these seconds for a micro-batch, all pieces together.

    One that is not trained has its forward pass alone.
    """
    pipeline = Pipeline(schedule, virtual, ahead)
    seconds = [each / virtual for each in (forward, backward, weights)]
    programs = []
    for stage in range(stages):
        tasks = [
            task
            for piece in range(virtual)
            for task in _piece(stage, piece, stages, virtual, seconds, hop,
                               apart=schedule == "zero-bubble")
            if trained or task.segment < virtual
        ]  # fmt: skip
        tasks.sort(key=lambda task: task.segment)
        registers = [
            Register(name, (count,), "float32", TIMED, 0, 4) for t in tasks for name in t.outputs
        ]
        streams = dict.fromkeys(task.stream for task in tasks)
        order = tuple(
            (s, tuple(i for i, task in enumerate(tasks) if task.stream == s)) for s in streams
        )
        program = Program(
            "train", count, tuple(registers), tuple(tasks), order, micro_batches=count,
            stage=stage, sequence=pipeline.sequence(stage, stages, count) if trained
            else pipeline.streaming(stages, count),
        )  # fmt: skip
        programs.append(with_slots(program))
    return Plan(
        job="balanced", version="0.1.0", numpy="2.0", mesh=parse_mesh(f"stage={stages}"),
        device="host", machine="none", numerics="fast", seed=0, identity=(), variables=(),
        arenas=(("host", 0),), process_bytes=0, data=(), programs=tuple(programs),
        settings=Settings(epochs=1, steps_per_epoch=1),
    )  # fmt: skip


def _piece(stage, piece, stages, virtual, seconds, hop, apart):
    chunk, last = piece * stages + stage, stages * virtual - 1
    before, after = piece, 2 * virtual - 1 - piece
    forward, backward, weights = seconds

    def compute(name, inputs, length, segment):
        return Task(f"{name}{chunk}", "compute", "compute", name, tuple(inputs),
                    (f"{name}{chunk}",), seconds=length, phase=1, segment=segment)  # fmt: skip

    def receive(name, other, segment):
        peer = other % stages
        return Task(f"{name}{chunk}", RECEIVE, f"receive.{peer}.{name}{other}", RECEIVE, (),
                    (f"{name}{chunk}",), {"stage": peer, "message": _number(other, chunk, last)},
                    phase=1, segment=segment, seconds=hop)  # fmt: skip

    def send(name, other, segment):
        peer = other % stages
        return Task(f"{name}{chunk}>", SEND, f"send.{peer}.{name}{chunk}", SEND,
                    (f"{name}{chunk}",), (),
                    {"stage": peer, "message": _number(chunk, other, last)},
                    phase=1, segment=segment, seconds=hop)  # fmt: skip

    if chunk:
        yield receive("x", chunk - 1, before)
    yield compute("y", [f"x{chunk}"] if chunk else [], forward, before)
    if chunk < last:
        yield send("y", chunk + 1, before)
        yield receive("dy", chunk + 1, after)
    given = [f"y{chunk}", *([f"dy{chunk}"] if chunk < last else [])]
    yield compute("dx", given, backward + (0 if apart else weights), after)
    if chunk:
        yield send("dx", chunk - 1, after)
    if apart:
        yield compute("dw", [f"y{chunk}", f"dx{chunk}"], weights, after + virtual)


def _number(source, target, last):
    """Of a message between two pieces of the model."""
    return source if target > source else last + source
