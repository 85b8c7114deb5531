"""The wait-for graph of ranks that stand still, on real plans and all the positions of a walk."""

import random
from dataclasses import replace
from functools import cache

import pytest
from jobs import classifier, classifier_plan, compile_for
from pipeline_jobs import Case, layers, plan_of

from mpiflow.exec.beat import Beat, unpack
from mpiflow.exec.blame import COMPUTING, DEAF, HOST, LOST, READING, SILENT, WRITING, Court, Seen
from mpiflow.exec.position import Position
from mpiflow.plan.pieces import pieces_of
from mpiflow.plan.places import D2H, H2D, NCCL, STAGED
from mpiflow.plan.records import COMPUTE, READ, RECEIVE, SEND
from mpiflow.plan.unroll import unroll

PIPELINE = Case(layers, "stage=2,data=2", 4, "gpipe", zero=1)
UNEQUAL = Case(layers, "stage=2,data=2+1", 3)
ON_DEVICES = ("data=3", STAGED), ("data=3", NCCL)
ALONE = (COMPUTE, READ, H2D, D2H)
"""Kinds of tasks that take no other rank."""


@cache
def bound(case, rank):
    """The plan of a rank's stage, its training step without loops, and the tensors of that."""
    whole = plan_for(case)
    plan = whole.at_stage(whole.mesh.stage_of(rank)[0])
    program = plan.program("train")
    unrolled = unroll(program)
    return plan, unrolled, {**plan.tensors(program), **{r.name: r for r in unrolled.registers}}


@cache
def plan_on(mesh, route):
    return compile_for(mesh, classifier(), route=route)


def plan_for(case):
    if isinstance(case, tuple):
        return plan_on(*case)
    return classifier_plan(case) if isinstance(case, str) else plan_of(case)


class Rank:
    """One rank whose streams go on as far as the others let them."""

    def __init__(self, case, rank):
        self.rank, self.mesh = rank, plan_for(case).mesh
        self.stage, self.place = self.mesh.stage_of(rank)
        self.plan, program, self.tensors = bound(case, rank)
        self.needs = program.needs()
        self.tasks = {s: [program.tasks[i] for i in order] for s, order in program.order}
        self.done = dict.fromkeys(self.tasks, 0)
        self.ended, self.started = set(), set()
        self.met = {}  # by task: the ranks that take part, and what they do

    def key(self, task):
        """What the ranks that take part in a task call it alike."""
        if task.kind in (SEND, RECEIVE):
            return task.attributes["message"], task.micro
        return self.stage, task.name

    def head(self, stream):
        """The task that a stream is in, if it has come to it."""
        tasks, done = self.tasks[stream], self.done[stream]
        task = tasks[done] if done < len(tasks) else None
        return task if task and self.ended.issuperset(self.needs[task.name]) else None

    def advance(self, ranks, stuck):
        """Do one task of each stream, if that can be; whether any was done."""
        moved = False
        for stream in self.tasks:
            task = self.head(stream)
            if task is None:
                continue
            if task.kind not in ALONE:
                self.started.add((self.key(task), task.kind))
                if task.name not in self.met:
                    self.met[task.name] = self.others(task)
                others = self.met[task.name]
                if not all((self.key(task), k) in ranks[o].started for o, k in others):
                    continue
            if (self.rank, task.name) != stuck:
                self.done[stream] += 1
                self.ended.add(task.name)
                moved = True
        return moved

    def others(self, task):
        if task.kind in (SEND, RECEIVE):
            stage, kind = task.attributes["stage"], RECEIVE if task.kind == SEND else SEND
            (name,) = task.inputs or task.outputs
            here = self.plan.slice(self.place, self.plan.program("train"))
            pieces = pieces_of(task, self.tensors[name], here)
            return [(self.mesh.rank_in_stage(stage, place), kind) for place, _ in pieces]
        members = self.plan.slice(self.place).members(task.axis)
        return [(self.mesh.rank_in_stage(self.stage, m), task.kind) for m in members]

    def beat(self):
        ended = all(self.done[stream] == len(tasks) for stream, tasks in self.tasks.items())
        kernel = self.head(COMPUTE)
        position = Position(3, "train", 16, tuple(self.done.items()), kernel is not None)
        return Beat(self.rank, 9, Position(3) if ended else position, 5, ended, still=6.0)


def stand(case, culprit, name):
    """All ranks once nobody gets on, as `culprit` never ends a task."""
    ranks = [Rank(case, rank) for rank in range(plan_for(case).mesh.size)]
    while any([rank.advance(ranks, (culprit, name)) for rank in ranks]):
        pass
    assert name not in ranks[culprit].ended
    return ranks


COURTS = {}


def judge(plan, beats, **changes):
    if id(plan) not in COURTS:
        COURTS[id(plan)] = plan, Court(plan)
    seen = [Seen(beat.rank, "node", beat) for beat in beats]
    seen = [replace(s, **changes.get(f"rank{s.rank}", {})) for s in seen]
    return COURTS[id(plan)][1].judge(seen)


@pytest.mark.parametrize("case", ["data=2,model=2", PIPELINE, UNEQUAL, *ON_DEVICES], ids=str)
def test_who_is_stuck_in_a_kernel_a_read_or_is_silent_is_to_blame_wherever_it_is(case):
    plan = plan_for(case)
    draw = random.Random(7)
    size = plan.mesh.size
    for _ in range(12):
        culprit = draw.randrange(size)
        tasks = Rank(case, culprit).tasks
        task = draw.choice([*tasks[COMPUTE], *tasks.get(READ, ())])
        beats = [rank.beat() for rank in stand(case, culprit, task.name)]
        if task.kind == READ:
            beats[culprit] = replace(beats[culprit], reading="rows-1.h5 row 7 for step 17")
        verdict = judge(plan, beats)
        kind = COMPUTING if task.kind == COMPUTE else READING
        assert (verdict.kind, verdict.rank) == (kind, culprit), verdict.text
        if task.kind == COMPUTE:
            assert f"(node) has been in task {task.name.partition('#')[0]} (" in verdict.text
        else:
            assert "has been reading rows-1.h5 row 7 for step 17 for 6 s" in verdict.text
        silent = judge(plan, beats, **{f"rank{culprit}": {"silent": 8.0}})
        assert (silent.kind, silent.rank) == (SILENT, culprit)


@pytest.mark.parametrize("case", ON_DEVICES, ids=str)
def test_a_copy_that_does_not_end_is_to_blame_unless_nobody_looks_at_it(case):
    plan = plan_for(case)
    streams = Rank(case, 1).tasks
    copies = [task for stream in streams.values() for task in stream if task.kind in (H2D, D2H)]
    assert len(copies) >= 2
    for task in copies:
        beats = [rank.beat() for rank in stand(case, 1, task.name)]
        verdict = judge(plan, beats)
        assert (verdict.kind, verdict.rank) == (COMPUTING, 1), verdict.text
        assert f"rank 1 (node) has been in task {task.name} (" in verdict.text
        verdict = judge(plan, [beats[0], replace(beats[1], deaf=5.0), beats[2]])
        assert verdict.rank == 1
        assert verdict.kind == DEAF, verdict.text


def test_the_sentence_names_rank_task_line_step_and_victims():
    plan = classifier_plan("data=4")
    task = next(t for t in Rank("data=4", 2).tasks[COMPUTE] if "relu" in t.name)
    beats = [rank.beat() for rank in stand("data=4", 2, task.name)]
    text = judge(plan, beats).text
    silent = judge(plan, beats, rank2={"silent": 8.0, "about": "whose process is stopped"})
    assert silent.text.startswith(
        "rank 2 (node), whose process is stopped, has been silent for 8 s;"
        " 3 ranks wait for it in task "
    )
    line = task.where.rpartition("/")[2]
    assert line.startswith("jobs.py:")
    assert text == (
        f"rank 2 (node) has been in task {task.name} (Relu, {line}) of step 17 for 6 s;"
        " 3 ranks wait for it"
    )


@pytest.mark.parametrize(
    ("case", "kinds"),
    [("data=3", ("collective",)), (PIPELINE, (SEND, RECEIVE)), (UNEQUAL, (SEND, RECEIVE))],
    ids=str,
)
def test_a_message_that_all_have_come_to_is_lost(case, kinds):
    """Every end waits in what all others have begun."""
    plan = plan_for(case)
    for culprit in range(plan.mesh.size):
        streams = Rank(case, culprit).tasks.values()
        names = [task.name for tasks in streams for task in tasks if task.kind in kinds]
        for name in names[:: max(len(names) // 3, 1)]:
            ranks = stand(case, culprit, name)
            verdict = judge(plan, [rank.beat() for rank in ranks])
            assert verdict.kind == LOST, verdict.text
            assert "a message between them is lost" in verdict.text


def test_between_steps_the_rank_that_has_not_come_is_to_blame():
    plan = classifier_plan("data=3")
    waiting = [Beat(rank, 9, Position(8), 12, True, still=30.0) for rank in range(3)]
    busy = replace(waiting[1], entered=11, waiting=False)
    verdict = judge(plan, [waiting[0], busy, waiting[2]])
    assert (verdict.kind, verdict.rank) == (HOST, 1)
    assert verdict.text.endswith("between two steps for 30 s; 2 ranks wait for it")
    saving = replace(busy, saving=True, writing="fc1.weight")
    verdict = judge(plan, [waiting[0], saving, waiting[2]])
    assert (verdict.kind, verdict.rank) == (WRITING, 1)
    assert "has been storing fc1.weight for 30 s" in verdict.text
    verdict = judge(plan, waiting)
    assert verdict.kind == LOST


def test_a_rank_that_was_never_heard_is_silent():
    plan = classifier_plan("data=3")
    seen = [Seen(rank, "node", Beat(rank, 1, Position(1), 4, True, still=30.0)) for rank in (0, 1)]
    verdict = Court(plan).judge([*seen, Seen(2, "far", None, 31.0)])
    assert verdict.text == "rank 2 (far) has been silent for 31 s; 2 ranks wait for it"


def test_a_beat_is_read_back_and_anything_else_is_dropped():
    position = Position(3, "train", 7, ((COMPUTE, 5), ("comm.data", 1)), True, 0.25)
    beat = Beat(1, 9, position, 5, True, "rows.h5", "", False, 1.5, 'File "a.py"')
    data = beat.pack()
    assert unpack(data) == beat
    for wrong in (b"", b"null", b"[]", b"{}", data[:-2], data.replace(b"rank", b"tank"), b"\xff"):
        assert unpack(wrong) is None


def test_of_ranks_that_are_all_in_a_message_the_one_that_never_looks_holds_it_up():
    """Its main thread sleeps on, or does not come back from MPI; no message is lost."""
    plan = classifier_plan("data=3")
    ranks = [Rank("data=3", rank) for rank in range(3)]
    name = ranks[0].tasks["comm.data"][0].name
    while any([rank.advance(ranks, (rank.rank, name)) for rank in ranks]):
        pass
    lost = judge(plan, [rank.beat() for rank in ranks])
    beats = [replace(r.beat(), deaf=5.0 * (r.rank == 1)) for r in ranks]
    verdict = judge(plan, beats)
    assert (verdict.kind, verdict.rank) == (DEAF, 1)
    assert verdict.text.startswith("rank 1 (node) has not looked at its messages for 6 s in task")
    assert verdict.text.endswith("2 ranks wait for it")
    assert lost.kind == LOST


def test_one_that_never_looks_is_not_to_blame_where_what_it_waits_for_computes():
    """It may be in a call of MPI that ends when the other has come."""
    plan = classifier_plan("data=3")
    task = Rank("data=3", 2).tasks[COMPUTE][3]
    beats = [replace(rank.beat(), deaf=5.0) for rank in stand("data=3", 2, task.name)]
    verdict = judge(plan, beats)
    assert (verdict.kind, verdict.rank) == (COMPUTING, 2), verdict.text


def test_between_steps_one_that_waits_and_never_looks_is_to_blame():
    plan = classifier_plan("data=3")
    waiting = [Beat(rank, 9, Position(8), 12, True, still=30.0) for rank in range(3)]
    verdict = judge(plan, [*waiting[:2], replace(waiting[2], deaf=9.0, stack="  File x")])
    assert (verdict.kind, verdict.rank) == (DEAF, 2)
    assert verdict.text == (
        "rank 2 (node) has not looked at its messages for 30 s in the time between two steps;"
        " 2 ranks wait for it\n  File x"
    )
