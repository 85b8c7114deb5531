"""Small programs at random: right ones and wrong ones."""

import random
from dataclasses import replace

from handmade import Maker, collective, compute, data_set, program, read, write

from mpiflow.plan.records import Output


def random_plan(seed):
    """A read, some computations and collectives, an update; places and order by chance."""
    draw = random.Random(seed)
    m = Maker("data=2")
    slots = draw.choice([1, 1, 2])
    places = [4 * i for i in range(1 + slots, draw.choice([8, 16, 32]))]
    offset = 4 if draw.random() < 0.9 else draw.choice(places[:3])
    registers = {"x": m.tensor("x", (), "P", offset, slots=slots)}
    tasks, unread, updated = [read("r0", "x")], ["x"], False
    for i in range(draw.randint(3, 5)):
        name = f"a{i}"
        after = (draw.choice(tasks).name,) if draw.random() < 0.2 else ()
        if draw.random() < 0.4:
            inputs = [draw.choice([n for n, r in registers.items() if str(r.layout[0]) == "P"])]
            layout = "B"
            task = collective(f"c{i}", "all_reduce", "data", inputs[0], name, after=after)
        else:
            inputs = draw.sample(list(registers), min(len(registers), 1 + i % 2))
            layout = draw.choice("BP")
            read_too = " w" if draw.random() < 0.3 else ""
            task = compute(f"t{i}", "add", " ".join(inputs) + read_too, name, after=after)
        offset, aliases = draw.choice(places), ""
        if draw.random() < 0.3 and inputs[0] != "x":
            offset, aliases = registers[inputs[0]].offset, inputs[0]
        registers[name] = m.tensor(name, (), layout, offset, aliases=aliases)
        unread = [n for n in unread if n not in inputs] + [name]
        tasks.append(task)
        if not updated and draw.random() < 0.25:
            updated = True
            tasks.append(compute("update", "sgd", f"w {name}", "w"))
            unread.remove(name)
    if draw.random() < 0.3:
        staged = draw.choice(["w", *registers])
        if staged not in ("w", "x") and not registers[staged].aliases:
            registers[staged] = replace(registers[staged], slots=draw.choice([1, 2]))
        tasks.append(write("write", staged))
        unread = [name for name in unread if name != staged]
    registers["y"] = m.tensor("y", (), "B", draw.choice(places))
    workspace = draw.choice([(0, 0), (draw.choice(places), 4)])
    tasks.append(compute("last", "sum", " ".join(unread or ["x"]), "y", workspace=workspace))
    train = program(
        "train", registers.values(), tasks, outputs=(Output("loss", "y"),), data="train"
    )
    if draw.random() < 0.15:
        train = _shuffled(train, draw)
    init = program("initialise", [], [compute("i0", "zeros", "", "w")])
    return m.plan([m.variable("w", (), "B", 0)], [init, train], 128, (data_set(),))


def _shuffled(program, draw):
    """The program with one stream in another order."""
    order = dict(program.order)
    stream = draw.choice(list(order))
    order[stream] = tuple(draw.sample(order[stream], len(order[stream])))
    return replace(program, order=tuple(order.items()))
