"""The program of `test_rendezvous.py`: random plans one after another, by MPI that buffers nothing.

    mpiexec -n 4 python tests/mpi/rendezvous_ranks.py COUNT [ROUTE [FIRST]]

Sends are over only once they are received, and at random times a rank looks away, or waits before
it starts something. ROUTE is that of plans for the fake device, "" for ranks on CPUs. Jobs of the
same model and optimizer must lose the same on every mesh.
"""

import faulthandler
import json
import random
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "local")]

import jobs  # noqa: E402
from jobs import MemoryReader, train  # noqa: E402
from micro_jobs import arrays  # noqa: E402
from pipeline_jobs import BATCH, OPTIMIZERS, Case, branches, layers, plan_of, weighted  # noqa: E402

from mpiflow.compiler.pipeline import SCHEDULES  # noqa: E402
from mpiflow.errors import CompileError, UsageError  # noqa: E402
from mpiflow.exec import mpi  # noqa: E402
from mpiflow.exec.failure import Failure  # noqa: E402
from mpiflow.exec.lanes import KernelLane, Lane, MessageLane  # noqa: E402
from mpiflow.exec.launch import connect  # noqa: E402
from mpiflow.exec.session import Session  # noqa: E402
from mpiflow.plan.store import dumps, loads  # noqa: E402

STEPS = 3
LONGEST = 120.0
"""Seconds for a plan; one that takes longer hangs, and where is printed."""
MESHES = (
    "stage=4", "stage=2,data=2", "stage=2,model=2", "data=2,stage=2", "stage=2,data=3+1",
    "stage=3,data=1+2+1", "stage=2,data=1+3", "stage=3,model=1+1+2", "data=2,model=2", "data=4",
)  # fmt: skip
LATE = (0.0, 0.0, 0.0, 1e-4, 5e-4, 2e-3)
"""Seconds, drawn before each start."""


def any_case(seed):
    """A job on four ranks, in any way that its plan can be made."""
    draw = random.Random(seed)
    while True:
        case = Case(
            draw.choice((layers, branches, weighted)),
            draw.choice(MESHES),
            draw.choice([n for n in range(1, 13) if BATCH % n == 0]),
            draw.choice(SCHEDULES),
            optimizer=draw.choice(sorted(OPTIMIZERS)),
            zero=draw.randint(0, 3),
            recompute=draw.choice((None, "selective", "full")),
            forced=draw.choice((None, draw.randrange(1000))),
        )
        if case.schedule == "interleaved":
            case = replace(case, virtual=2)
        with suppress(UsageError, CompileError):  # as not every mesh has stages that can be cut
            return case, plan_of(case)


def delay_everything(seed):
    """Let this process look for the end of messages, and start what it may, at random times."""
    draw = random.Random(seed)

    def late(start):
        def started(lane, number):
            time.sleep(draw.choice(LATE))
            start(lane, number)

        return started

    move = Lane.move
    Lane.move = lambda lane: draw.random() < 0.7 and move(lane)
    for kind in (KernelLane, MessageLane):
        kind._start = late(kind._start)


def losses(plan, transport):
    """What each step of a plan loses."""
    failure = Failure(transport)
    readers = {d.name: MemoryReader(arrays(BATCH), BATCH) for d in plan.data}
    session = Session(plan, transport, readers, start_thread=failure.start_thread,
                      device=jobs.device_of(plan, transport.rank))  # fmt: skip
    session.run("initialise")
    found = [step["loss"] for step in train(session, STEPS)]
    session.close()
    return found


def main(count, route="", first=0):
    jobs.ROUTE, count, first = route, int(count), int(first)
    mpi.MpiGroup.synchronous = True
    known = {}
    for seed in range(first, first + count):
        transport = connect()
        if seed == first:
            delay_everything(1000 * first + transport.rank)
        case, content = None, None
        if transport.rank == 0:
            case, plan = any_case(seed)
            content = dumps(plan)
        plan = loads(transport.broadcast(content))
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        found = losses(plan, transport)
        everywhere = [json.loads(each) for each in transport.all_gather(json.dumps(found).encode())]
        faulthandler.cancel_dump_traceback_later()
        assert all(each == found for each in everywhere), everywhere
        if transport.rank == 0:
            print(f"{seed}: {case}", flush=True)
            wanted = known.setdefault((case.model, case.optimizer), found)
            np.testing.assert_allclose(found, wanted, rtol=1e-8)
        transport.close()
    if transport.rank == 0:
        print(f"{count} plans came to their ends", flush=True)


main(*sys.argv[1:])
