"""The meaning of a plan by brute force: run every interleaving and watch every byte.

Slow and simple on purpose: it knows what may start when and what memory then holds, and nothing
of happens-before. Good for programs of a few tasks.
"""

from bisect import bisect_left


class Fault(Exception):
    """Some interleaving hangs, or reads or leaves behind what it should not."""


def explore(plan, program, steps=3):
    """Raise Fault where any interleaving of `steps` steps goes wrong; give the states seen."""
    return explored(Machine(plan, program, steps))


def explored(machine):
    """Raise Fault where any way through the states goes or ends wrong; give how many there are."""
    todo, seen = [machine.initial()], set()
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        following = list(machine.moves(state))
        if not following:
            machine.check_end(state)
        todo += following
    return len(seen)


class Machine:
    """State: 2 x firings done (+ 1 while running) of each task, and the owner of each segment."""

    def __init__(self, plan, program, steps):
        self.program, self.tasks, self.steps = program, program.tasks, steps
        self.tensors = plan.tensors(program)
        self.variables = {v.name for v in plan.variables}
        self.producer = {n: i for i, t in enumerate(self.tasks) for n in t.outputs}
        self.readers = {n: [i for i, t in enumerate(self.tasks) if n in t.inputs]
                        for n in self.tensors}  # fmt: skip
        self.index = {t.name: i for i, t in enumerate(self.tasks)}
        edges = {0}
        for r in self.tensors.values():
            edges |= {r.offset + i * r.nbytes for i in range(r.slots + 1)}
        for t in self.tasks:
            edges |= {t.workspace[0], sum(t.workspace)}
        self.edges = sorted(edges)
        self.inside = [i for i, t in enumerate(self.tasks) if t.stream not in ("read", "write")]

    def initial(self):
        memory = [None] * len(self.edges)
        for name in sorted(self.variables):
            for at in self.bytes(name, 0):
                memory[at] = (name, 0)
        return (0,) * len(self.tasks), tuple(memory)

    def check_end(self, state):
        if any(done < 2 * self.steps for done in state[0]):
            raise Fault("hangs")

    def segments(self, start, nbytes):
        return range(bisect_left(self.edges, start), bisect_left(self.edges, start + nbytes))

    def bytes(self, name, step):
        r = self.tensors[name]
        return self.segments(r.offset + step % max(1, r.slots) * r.nbytes, r.nbytes)

    def value(self, name, step):
        """What the memory of a tensor holds while step `step` may read it."""
        if name in self.variables:
            return (name, step if name in self.producer else 0)
        return (name, step)

    def expect(self, memory, name, step, value, why):
        if any(memory[at] != value for at in self.bytes(name, step)):
            raise Fault(f"{why}: {name} of step {step} is not there")

    def may_start(self, done, i):
        step, task = done[i] // 2, self.tasks[i]
        needs = [(self.index[n], step + 1) for n in task.after]
        needs += [(self.producer[n], step + 1) for n in task.inputs if n not in self.variables]
        for stream, tasks in self.program.order:
            if stream == task.stream:
                place = tasks.index(i)
                needs.append((tasks[place - 1], step + 1 if place else step))
        for name in task.outputs:
            if name not in self.variables:
                needs += [(r, step + 1 - self.tensors[name].slots) for r in self.readers[name]]
        if task.stream != "read":
            needs += [(other, step) for other in self.inside]
        return all(done[other] // 2 >= count for other, count in needs)

    def moves(self, state):
        done, memory = state
        for i in range(len(self.tasks)):
            if done[i] % 2:
                yield self.stop(done, list(memory), i)
            elif done[i] < 2 * self.steps and self.may_start(done, i):
                yield self.start(done, list(memory), i)

    def start(self, done, memory, i):
        step, task = done[i] // 2, self.tasks[i]
        if step and task.stream != "read" and all(done[j] == 2 * step for j in self.inside):
            self.check_step(memory, step - 1)
        for name in task.inputs:
            self.expect(memory, name, step, self.value(name, step), f"{task.name} starts")
        written = self.written(i, step)
        if len(set(written)) < len(written):
            raise Fault(f"{task.name} writes two things to one place")
        for at in written:
            memory[at] = (task.name, step, "at work")
        return self.advance(done, i), tuple(memory)

    def stop(self, done, memory, i):
        step, task = done[i] // 2, self.tasks[i]
        mine = (task.name, step, "at work")
        if any(memory[at] != mine for at in self.written(i, step)):
            raise Fault(f"{task.name} was overwritten at work")
        overlaid = {self.tensors[n].aliases for n in task.outputs} | set(task.outputs)
        for name in task.inputs:
            if name not in overlaid:
                self.expect(memory, name, step, self.value(name, step), f"{task.name} stops")
        for at in self.segments(*task.workspace):
            memory[at] = None
        for name in task.outputs:
            for at in self.bytes(name, step):
                memory[at] = (name, step + (name in self.variables))
        done = self.advance(done, i)
        if i in self.inside and all(done[j] == 2 * step + 2 for j in self.inside):
            self.check_step(memory, step)
        return done, tuple(memory)

    def written(self, i, step):
        task = self.tasks[i]
        places = [at for name in task.outputs for at in self.bytes(name, step)]
        return [*places, *self.segments(*task.workspace)]

    def check_step(self, memory, step):
        for output in self.program.outputs:
            self.expect(memory, output.register, step, (output.register, step), "the step ends")
        for name in sorted(self.variables):
            self.expect(memory, name, step, self.value(name, step + 1), "the step ends")

    @staticmethod
    def advance(done, i):
        return (*done[:i], done[i] + 1, *done[i + 1 :])
