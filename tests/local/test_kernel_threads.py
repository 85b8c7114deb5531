"""Where kernels run: beside the messages of their program, or between looks at them."""

import pytest

from mpiflow.calibration.jobs import Drawn, _dense
from mpiflow.exec.local import run_local
from mpiflow.exec.segments import HostStream, InlineStream
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import Mesh


def kinds(monkeypatch, hosts, cpus, long):
    """The stream of each rank, and how many looks are between its kernels."""
    monkeypatch.setattr("mpiflow.exec.session.threads_per_rank", lambda _: cpus)
    monkeypatch.setattr("mpiflow.exec.bind._LONG_KERNEL_SECONDS", 0.0 if long else 1.0)
    monkeypatch.setattr("mpiflow.exec.session.LONGEST_SLEEP_SECONDS", 1e-9)
    plan = _dense(32, 64).plan(Mesh((("data", 2),)))

    def rank(transport):
        transport.host = f"host{transport.rank % hosts}"
        session = Session(plan, transport, {"train": Drawn(plan)})
        session.run("initialise")
        session.expect("train", range(2))
        for step in range(2):
            session.run("train", step)
        bound = session._programs["train"]
        kind = type(session._stream(bound, "compute"))
        segments = bound.phase.kernels.segments
        looks = sum(call == session.engine.look for each in segments for call in each.calls)
        session.close()
        return kind, looks

    return run_local(2, rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("hosts", "cpus", "long", "thread"),
    [
        (2, 2, False, True),
        (2, 1, True, True),
        (2, 1, False, False),  # a thread would take turns with them on one core
        (1, 1, True, False),  # messages are copies, which the same core makes
    ],
)
def test_kernels_have_a_thread_where_messages_can_go_on_beside_them(
    monkeypatch, hosts, cpus, long, thread
):
    for kind, looks in kinds(monkeypatch, hosts, cpus, long):
        assert kind is (HostStream if thread else InlineStream)
        assert (looks == 0) == thread


def test_a_job_without_messages_is_not_interrupted(monkeypatch):
    monkeypatch.setattr("mpiflow.exec.session.LONGEST_SLEEP_SECONDS", 0.0)
    plan = _dense(32, 64).plan()
    (session,) = run_local(1, lambda transport: Session(plan, transport, {"train": Drawn(plan)}))
    calls = [c for each in session._programs["train"].phase.kernels.segments for c in each.calls]
    session.close()
    assert calls
    assert session.engine.look not in calls
