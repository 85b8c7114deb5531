"""Memory of devices is handed to MPI only where bytes that were sent came as they were."""

import numpy as np
import pytest

from mpiflow.errors import LaunchError
from mpiflow.exec import proof
from mpiflow.exec.fake import Fake
from mpiflow.exec.local import LocalGroup, run_local
from mpiflow.exec.proof import prove

HOSTS = ("a", "a", "b", "b", "b")


def proven(size, device=Fake, takes=""):
    def work(transport):
        transport.host = HOSTS[transport.rank]
        transport.takes_device_memory = lambda: takes if transport.rank == 1 else ""
        try:
            prove(transport, device())
        except LaunchError as error:
            return str(error)
        return ""

    return run_local(size, work)


@pytest.mark.ranks(5)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_comes_as_it_was_sent_is_proof(size):
    assert proven(size) == [""] * size


@pytest.mark.ranks(5)
def test_every_rank_tries_its_own_host_and_another(monkeypatch):
    tried = set()
    plain = proof._try

    def noted(transport, device, group, before, after, *more):
        tried.add((transport.rank, after))
        return plain(transport, device, group, before, after, *more)

    monkeypatch.setattr(proof, "_try", noted)
    proven(5)
    assert tried == {(0, 1), (1, 0), (2, 3), (3, 4), (4, 2), (0, 2), (2, 0), (1, 3), (3, 1)}


class Deaf(Fake):
    """What is received never reaches it, as where MPI writes to memory of the host."""

    def fetch(self, array):
        return np.zeros_like(array)


@pytest.mark.ranks(3)
def test_what_came_and_what_was_sent_are_told_on_all_ranks():
    found = proven(3, Deaf)
    assert len(set(found)) == 1
    assert "rank 0 on a (and 1 more): of 64 bytes from rank" in found[0]
    assert "byte 0 is 0, where" in found[0]
    assert "--route nccl or --route staged" in found[0]


@pytest.mark.ranks(2)
def test_one_rank_that_receives_nothing_is_named_and_not_the_one_that_would_wait_for_it():
    def work(transport):
        transport.takes_device_memory = lambda: ""
        device = (Fake, Deaf)[transport.rank]()
        with pytest.raises(LaunchError) as error:
            prove(transport, device)
        return str(error.value)

    first, second = run_local(2, work)
    assert first == second
    assert "rank 1 on" in first
    assert "under way" not in first


@pytest.mark.ranks(2)
def test_a_library_that_does_not_say_that_it_can_is_not_tried(monkeypatch):
    monkeypatch.setattr(proof, "_try", None)
    assert (
        proven(2, takes="MPICH 5 does not say")
        == [
            "the plan hands memory of GPUs to MPI (route mpi), which cannot be: rank 1 on a: MPICH"
            " 5 does not say; make the plan with --route nccl or --route staged"
        ]
        * 2
    )


@pytest.mark.ranks(2)
def test_what_does_not_come_is_waited_for_no_longer_than_that(monkeypatch):
    monkeypatch.setattr(proof, "_SECONDS", 0.01)
    plain = LocalGroup._meet_peer
    monkeypatch.setattr(
        LocalGroup, "_meet_peer",
        lambda self, call: plain(self, call) if call.kind == "receive" or self.index else _Never(),
    )  # fmt: skip
    said = "64 bytes from rank 1, or those to rank 1, were still under way after 0 s"
    assert said in proven(2)[0]


class _Never:
    def test(self):
        return False
