"""The meaning of a step of several stages by brute force: every interleaving, every byte watched.

Slow and simple on purpose: it writes loops out, knows what may start when and what memory then
holds. Firings that no other can disturb are not interleaved with others, as that shows nothing: a
firing is disturbed by those that touch its bytes (one of the two writing) in no certain order.
"""

from bisect import bisect_left

from oracle import Fault, explored

from mpiflow.plan.records import READ, RECEIVE, SEND
from mpiflow.plan.unroll import slot_before, unroll


def explore_stages(plan, name, *, reduced=True):
    """Raise Fault where any interleaving of a step goes wrong; give the number of states seen."""
    return explored(Machine(plan, name, reduced))


class Lane:
    """The firings and the memory of one stage; numbers begin at `first`, segments at `base`."""

    def __init__(self, plan, program, first, base):
        self.program, self.first, self.base = unroll(program), first, base
        self.tensors = {**plan.tensors(program), **{r.name: r for r in self.program.registers}}
        self.tasks = self.program.tasks
        self.variables = {v.name for v in plan.variables if v.stage == program.stage}
        self.number = {task.name: first + i for i, task in enumerate(self.tasks)}
        self.maker = {n: first + i for i, t in enumerate(self.tasks) for n in t.outputs}
        places = [self.place(n) for n in self.tensors] + [t.workspace for t in self.tasks]
        self.edges = sorted({edge for at, size in places for edge in (at, at + size)})

    def place(self, name):
        r = self.tensors[name]
        slot = r.micro % r.slots
        return r.offset + slot * r.nbytes, r.nbytes

    def segments(self, start, nbytes):
        first, stop = bisect_left(self.edges, start), bisect_left(self.edges, start + nbytes)
        return range(self.base + first, self.base + stop)

    def needs(self, i):
        """Firings that must be over, but for the order of streams."""
        task = self.tasks[i]
        found = {self.number[n] for n in task.after}
        for name in set(task.inputs) - self.variables:
            if name not in self.maker:
                raise Fault(f"{task.name} reads {name}, which nothing makes")
            found.add(self.maker[name])
        if task.stream == READ:
            for name in task.outputs:
                held, ago = slot_before(self.tensors[name], self.program.micro_batches)
                if not ago:
                    found |= {self.number[t.name] for t in self.tasks if held in t.inputs}
        return found


class Machine:
    """State: of each stream the firings begun, and whether the last still works; what memory has.

    A segment of memory holds the name of a value, or the number of the firing that works on it.
    """

    def __init__(self, plan, name, reduced=True):
        self.lanes, self.tasks, self.lane, self.needs = [], [], [], []
        base = 0
        for program in (p for p in plan.programs if p.name == name):
            lane = Lane(plan, program, len(self.tasks), base)
            base += len(lane.edges)
            self.lanes.append(lane)
            self.tasks += lane.tasks
            self.lane += [lane] * len(lane.tasks)
            self.needs += [lane.needs(i) for i in range(len(lane.tasks))]
        self.size = base
        self.streams = [
            [lane.first + i for i in order]
            for lane in self.lanes
            for _, order in lane.program.order
        ]
        self.at = {i: (s, p) for s, order in enumerate(self.streams) for p, i in enumerate(order)}
        self.peer = self._peers()
        self.reads = [self._segments(i, task.inputs) for i, task in enumerate(self.tasks)]
        self.writes = [self._segments(i, task.outputs) for i, task in enumerate(self.tasks)]
        self.work = [self.lane[i].segments(*task.workspace) for i, task in enumerate(self.tasks)]
        self.safe = self._undisturbed() if reduced else set()

    def _segments(self, i, names):
        lane = self.lane[i]
        return {name: lane.segments(*lane.place(name)) for name in names}

    def _peers(self):
        """The other end of each message; an end without one is its own, and never ready."""
        ends = {}
        for i, task in enumerate(self.tasks):
            if task.kind in (SEND, RECEIVE):
                stages = self.lane[i].program.stage, task.attributes["stage"]
                source, target = stages if task.kind == SEND else stages[::-1]
                key = source, target, task.attributes["message"], task.micro
                ends.setdefault(key, {}).setdefault(task.kind, []).append(i)
        found = {i: i for both in ends.values() for these in both.values() for i in these}
        for both in ends.values():
            for a, b in zip(both.get(SEND, ()), both.get(RECEIVE, ()), strict=False):
                found |= {a: b, b: a}
        return found

    def _undisturbed(self):
        """Firings that are ordered with all others that touch what they write, or write theirs."""
        before = [self._before(i) for i in range(len(self.tasks))]
        used, wrote = [], []
        for i in range(len(self.tasks)):
            mine = {at for spans in self.writes[i].values() for at in spans} | set(self.work[i])
            wrote.append(mine)
            used.append(mine | {at for spans in self.reads[i].values() for at in spans})
        touching = {}
        for i, places in enumerate(used):
            for at in places:
                touching.setdefault(at, set()).add(i)
        safe = set()
        for i in range(len(self.tasks)):
            others = {j for at in wrote[i] for j in touching[at]}
            others |= {j for at in used[i] for j in touching[at] if at in wrote[j]}
            if all(j == i or j in before[i] or i in before[j] for j in others):
                safe.add(i)
        return {i for i in safe if self.peer.get(i, i) in safe}

    def _before(self, i):
        """All that is over when a firing starts, whatever the timing."""
        found, todo = set(), [i]
        while todo:
            task = todo.pop()
            stream, place = self.at[task]
            new = self.needs[task] | set(self.streams[stream][place - 1 : place])
            if task in self.peer:
                other, place = self.at[self.peer[task]]
                new |= self.needs[self.peer[task]] | set(self.streams[other][place - 1 : place])
            todo += new - found
            found |= new
        return found

    def initial(self):
        memory = [None] * self.size
        for lane in self.lanes:
            for name in lane.variables:
                for at in lane.segments(*lane.place(name)):
                    memory[at] = name
        return (0,) * len(self.streams), (False,) * len(self.streams), tuple(memory)

    def moves(self, state):
        begun, working, _ = state
        heads = [
            order[n] for order, n, busy in zip(self.streams, begun, working, strict=True)
            if not busy and n < len(order)
        ]  # fmt: skip
        ready = {i for i in heads if self._ready(i, begun, working)}
        ready = [i for i in sorted(ready) if i not in self.peer or self.peer[i] in ready - {i}]
        for i in ready:
            if i in self.safe:
                yield self._stop(i, self._start(i, state))
                return
        for i in ready:
            if self.peer.get(i, i) >= i:
                yield self._start(i, state)
        for order, n, busy in zip(self.streams, begun, working, strict=True):
            if busy and self.peer.get(order[n - 1], order[n - 1]) >= order[n - 1]:
                yield self._stop(order[n - 1], state)

    def _ready(self, i, begun, working):
        for need in self.needs[i]:
            stream, place = self.at[need]
            if begun[stream] - working[stream] <= place:
                return False
        return True

    def _both(self, i):
        return (i, self.peer[i]) if i in self.peer else (i,)

    def _start(self, i, state):
        begun, working, memory = map(list, state)
        for j in self._both(i):
            for name, places in self.reads[j].items():
                self._expect(memory, places, name, f"{self.tasks[j].name} starts")
            written = [at for spans in self.writes[j].values() for at in spans] + list(self.work[j])
            if len(set(written)) < len(written):
                raise Fault(f"{self.tasks[j].name} writes two things to one place")
            for at in written:
                memory[at] = j
            begun[self.at[j][0]] += 1
            working[self.at[j][0]] = True
        return tuple(begun), tuple(working), tuple(memory)

    def _stop(self, i, state):
        begun, working, memory = map(list, state)
        for j in self._both(i):
            task, tensors = self.tasks[j], self.lane[j].tensors
            written = [at for spans in self.writes[j].values() for at in spans] + list(self.work[j])
            self._expect(memory, written, j, f"{task.name} is overwritten at work")
            overlaid = {tensors[n].aliases for n in task.outputs} | set(task.outputs)
            for name in set(task.inputs) - overlaid:
                self._expect(memory, self.reads[j][name], name, f"{task.name} stops")
            for at in self.work[j]:
                memory[at] = None
            for name, places in self.writes[j].items():
                for at in places:
                    memory[at] = f"new {name}" if name in self.lane[j].variables else name
            working[self.at[j][0]] = False
        return tuple(begun), tuple(working), tuple(memory)

    def _expect(self, memory, places, value, why):
        if any(memory[at] != value for at in places):
            raise Fault(f"{why}: {value} is not there")

    def check_end(self, state):
        begun, _, memory = state
        if any(n < len(order) for n, order in zip(begun, self.streams, strict=True)):
            raise Fault("hangs")
        for lane in self.lanes:
            for name in lane.variables:
                value = f"new {name}" if name in lane.maker else name
                self._expect(memory, lane.segments(*lane.place(name)), value, "the step ends")
            for output in lane.program.outputs:
                places = lane.segments(*lane.place(output.register))
                self._expect(memory, places, output.register, "the step ends")
