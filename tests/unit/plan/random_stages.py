"""Small pipelines at random, right by construction, and edits of them that may be faults or not."""

import random
from dataclasses import replace

import handmade
from mutants import with_program, with_register, with_task, without, without_task

from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import B, P
from mpiflow.plan.records import RECEIVE, SEND, Program, Register, Task, Variable

SHAPES = ((2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2))
"""Stages and micro-batches."""


def random_stages(seed, shapes=SHAPES):
    """A small pipeline that computes, reduces over two ranks, and updates."""
    draw = random.Random(seed)
    stages, micros = draw.choice(shapes)
    gpipe, skip = draw.random() < 0.3, stages > 2 and draw.random() < 0.5
    made = [_Stage(s, stages, micros, gpipe, skip, draw).program() for s in range(stages)]
    variables = tuple(
        Variable("w" if s < 2 else f"w{s}", (), "float32", (B,), 0, 4, stage=s)
        for s in range(stages)
    )
    begin = [
        Program("initialise", 0, (), (handmade.compute("i0", "zeros", "", v.name),),
                (("compute", (0,)),), stage=v.stage)
        for v in variables
    ]  # fmt: skip
    sizes = [
        max(*(r.offset + r.slots * r.nbytes for r in p.registers),
            *(sum(t.workspace) for t in p.tasks)) + 8
        for p in made
    ]  # fmt: skip
    arenas = (("host", max(sizes)), *((f"host.{s}", size) for s, size in enumerate(sizes)))
    plan = handmade.Maker("data=2").plan([], [], 0, (handmade.data_set(),))
    mesh = parse_mesh(f"stage={stages},data=2")
    return replace(plan, mesh=mesh, variables=variables, programs=(*begin, *made), arenas=arenas)


class _Stage:
    """What one stage does: forward, backward, and an update of its one weight."""

    def __init__(self, stage, stages, micros, gpipe, skip, draw):
        self.stage, self.stages, self.micros, self.draw = stage, stages, micros, draw
        self.in_flight = micros if gpipe else min(micros, stages - stage)
        self.skip, self.registers, self.tasks, self.top = skip, [], [], 4
        self.weight = "w" if stage < 2 else f"w{stage}"

    def register(self, name, slots=1, *, whole=False, partial=True, aliases=""):
        time = ((B if whole else P),) if self.micros > 1 else ()
        layout = (*time, P if partial else B)
        rewound = self.micros > 1 and not whole
        slots = slots if rewound else 1
        offset, same = self.top, [r for r in self.registers if r.name == aliases]
        if same:
            offset, slots, rewound = same[0].offset, same[0].slots, same[0].rewound
        self.registers.append(Register(name, (), "float32", layout, offset, 4, slots, aliases,
                                       rewound=rewound))  # fmt: skip
        self.top = max(self.top, offset + 4 * slots)
        return name

    def task(self, name, kind, inputs, outputs, segment=0, phase=1, *, op="", stream="", **more):
        loop = self.micros > 1
        work = (0, 0)
        if kind == "compute" and self.draw.random() < 0.3:
            work, self.top = (self.top, 4), self.top + 4
        self.tasks.append(
            Task(name, kind, stream or kind, op or kind, tuple(inputs), tuple(outputs),
                 phase=phase if loop else 0, segment=segment if loop else 0, nbytes=4,
                 workspace=work, where=f"model.py:{len(self.tasks)}", **more)
        )  # fmt: skip

    def message(self, kind, name, other, number, segment):
        ends = ((name,), ()) if kind == SEND else ((), (name,))
        self.task(f"{kind} {name} {other}", kind, *ends, segment, stream=f"{kind}.{other}",
                  attributes={"stage": other, "message": number})  # fmt: skip

    def program(self):
        s, last, slots = self.stage, self.stages - 1, self.in_flight
        taken = self.forward(s, last, slots)
        self.backward(s, last, slots, taken)
        self.update()
        order = {}
        for i in sorted(range(len(self.tasks)), key=lambda i: self.tasks[i].phase):
            order.setdefault(self.tasks[i].stream, []).append(i)
        return Program(
            "train", 6 * self.micros, tuple(self.registers), tuple(self.tasks),
            tuple((stream, tuple(tasks)) for stream, tasks in order.items()), data="train",
            micro_batches=self.micros, stage=s, sequence=self.sequence(),
        )  # fmt: skip

    def forward(self, s, last, slots):
        taken = []
        if s == 0:
            self.task("read", "read", (), [self.register("x")], op="read")
            count = max(1, slots) + self.draw.randint(0, 1)
            self.registers[-1] = replace(self.registers[-1], slots=count, rewound=False)
            self.top += 4 * count
            taken.append("x")
        else:
            taken.append(self.register("hin", slots))
            self.message(RECEIVE, "hin", s - 1, 1, 0)
        if s == 2 and self.skip:
            taken.append(self.register("skip", slots))
            self.message(RECEIVE, "skip", 0, 9, 0)
        self.task("f", "compute", [*taken, self.weight], [self.register("h", slots)], op="multiply")
        if s < last:
            self.message(SEND, "h", s + 1, 1, 0)
        if s == 0 and self.skip:
            self.message(SEND, "h", 2, 9, 0)
        return [*taken, "h"]

    def backward(self, s, last, slots, taken):
        if s < last:
            taken = [*taken, self.register("gin", self.draw.randint(1, 2))]
            self.message(RECEIVE, "gin", s + 1, 2, 1)
        self.task("b", "compute", [*taken, self.weight], [self.register("d")], 1, op="backward")
        self.task("e", "compute", ["d"], [self.register("e", aliases="d")], 1, op="scale")
        if s:
            slots = self.draw.randint(1, 2)
            self.task("c", "compute", [taken[0], "e"], [self.register("g", slots)], 1, op="turn")
            self.message(SEND, "g", s - 1, 2, 1)

    def update(self):
        gradient = "e"
        if self.micros > 1:
            self.task("add", "compute", ["e"], [self.register("sum", whole=True)], 1,
                      op="Accumulate")  # fmt: skip
            gradient = "sum"
        last_use = gradient == "sum" or self.stage == 0
        aliases = gradient if last_use and self.draw.random() < 0.5 else ""
        total = self.register("total", whole=True, partial=False, aliases=aliases)
        self.task("reduce", "collective", [gradient], [total], phase=2, op="all_reduce",
                  stream="comm.data", axis="data", attributes={"reduce": "sum"})  # fmt: skip
        self.task("update", "compute", ["total", self.weight], [self.weight], phase=2, op="sgd")

    def sequence(self):
        if self.micros == 1:
            return ()
        warm = self.in_flight - 1
        turns = [(0, k) for k in range(warm)]
        for k in range(self.micros):
            turns += [(0, k + warm)] * (k + warm < self.micros) + [(1, k)]
        return tuple(turns)


def edits(plan, draw):
    """A few edits of the training programs, drawn at random."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        program = draw.choice([p for p in plan.programs if p.name == "train"])
        plan = with_program(plan, program, draw.choice(EDITS)(program, draw))
    return plan


def swap(program, draw):
    """Two tasks of a stream, or two turns, in each other's place."""
    if program.sequence and draw.random() < 0.4:
        turns = list(program.sequence)
        a = draw.randrange(len(turns) - 1)
        turns[a : a + 2] = turns[a + 1], turns[a]
        return replace(program, sequence=tuple(turns))
    place, (stream, tasks) = draw.choice([p for p in enumerate(program.order) if p[1][1]])
    tasks = list(tasks)
    a, b = draw.randrange(len(tasks)), draw.randrange(len(tasks))
    tasks[a], tasks[b] = tasks[b], tasks[a]
    order = list(program.order)
    order[place] = stream, tuple(tasks)
    return replace(program, order=tuple(order))


def move(program, draw):
    """A register or a workspace to where another lies."""
    a, b = draw.choice(program.registers), draw.choice(program.registers)
    offset = b.offset + 4 * draw.randrange(b.slots)
    if draw.random() < 0.2:
        return with_task(program, draw.randrange(len(program.tasks)), workspace=(offset, 4))
    if any(r.aliases == a.name for r in program.registers) or a.aliases:
        return program
    return with_register(program, a.name, offset=offset)


def fewer_slots(program, draw):
    """A slot less, for what has several."""
    several = [r.name for r in program.registers if r.slots > 1]
    if not several:
        return move(program, draw)
    name = draw.choice(several)
    slots = next(r.slots for r in program.registers if r.name == name)
    return with_register(program, name, slots=slots - 1)


def forget(program, draw):
    """An input that a task does not wait for, as it no longer names it."""
    i = draw.choice([i for i, t in enumerate(program.tasks) if t.inputs])
    gone = draw.choice(program.tasks[i].inputs)
    return with_task(program, i, inputs=without(program.tasks[i].inputs, gone))


def drop(program, draw):
    """An end of a message less; what would be received is not used either."""
    ends = [i for i, t in enumerate(program.tasks) if t.kind in (SEND, RECEIVE)]
    if not ends:
        return program
    gone = draw.choice(ends)
    names = program.tasks[gone].outputs
    tasks = tuple(
        replace(t, inputs=tuple(n for n in t.inputs if n not in names)) for t in program.tasks
    )
    registers = tuple(r for r in program.registers if r.name not in names)
    return without_task(replace(program, tasks=tasks, registers=registers), gone)


def other_message(program, draw):
    """An end of a message takes part in another one."""
    ends = [i for i, t in enumerate(program.tasks) if t.kind in (SEND, RECEIVE)]
    if not ends:
        return program
    a, b = draw.choice(ends), draw.choice(ends)
    return with_task(program, a, attributes=program.tasks[b].attributes)


def wait(program, draw):
    """A task after another of its phase."""
    i, other = draw.randrange(len(program.tasks)), draw.choice(program.tasks)
    if other.phase > program.tasks[i].phase or other is program.tasks[i]:
        return program
    return with_task(program, i, after=(*program.tasks[i].after, other.name))


EDITS = (swap, swap, swap, move, move, move, fewer_slots, forget, drop, other_message, wait)
