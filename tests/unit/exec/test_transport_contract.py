import os
import subprocess
import sys

import numpy as np
import pytest
import transport_contract

from mpiflow.errors import LaunchError, TaskError
from mpiflow.exec.launch import check_ranks, check_world, expected_ranks
from mpiflow.exec.local import LocalWorld, run_local
from mpiflow.exec.transport import Aborted
from mpiflow.threads import (
    describe_threads,
    limit_threads,
    local_ranks,
    threads_per_rank,
    usable_cpus,
)


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3, 5)]
)
@pytest.mark.parametrize("claim", transport_contract.CLAIMS, ids=lambda claim: claim.__name__)
def test_local_transport(claim, size):
    run_local(size, claim)


def test_run_local_gives_results_by_rank():
    assert run_local(3, lambda transport: transport.rank * 10) == [0, 10, 20]


def test_the_first_error_wakes_every_rank_that_waits():
    woken = []

    def work(transport):
        try:
            start = transport.group((0, 1, 2), "data").bind_all_reduce(np.zeros(2))
            if transport.rank == 1:
                raise ValueError("planted")
            start().wait()
        except Aborted:
            woken.append(transport.rank)
            raise

    with pytest.raises(ValueError, match="planted"):
        run_local(3, work)
    assert sorted(woken) == [0, 2]


def test_sums_are_added_in_rank_order():
    def work(transport):
        buffer = np.array([[1e8, 1.0, -1e8][transport.rank]], np.float32)
        transport.group((0, 1, 2), "data").bind_all_reduce(buffer)().wait()
        return buffer[0]

    assert set(run_local(3, work)) == {np.float32(1e8) + np.float32(1) - np.float32(1e8)}


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (("all_reduce", 4), ("all_reduce", 5), ["sum(4)", "sum(5)"]),
        (("all_reduce", 4), ("all_gather", 2), ["all_reduce", "all_gather"]),
        (("all_reduce", 4), ("all_to_all", 2), ["all_reduce", "all_to_all"]),
    ],
)
def test_members_in_different_collectives_are_named(one, other, names):
    def bind(group, kind, n):
        if kind == "all_reduce":
            return group.bind_all_reduce(np.zeros(n))
        if kind == "all_gather":
            return group.bind_all_gather(np.zeros(n), np.zeros(2 * n), (n, n))
        return group.bind_all_to_all(np.zeros(2 * n), (n, n), np.zeros(2 * n), (n, n))

    def work(transport):
        group = transport.group((0, 1), "data")
        bind(group, *(other if transport.rank else one))().wait()

    with pytest.raises(TaskError) as caught:
        run_local(2, work)
    for name in [*names, "rank 0", "rank 1", "data"]:
        assert name in str(caught.value)


def test_an_all_to_all_whose_parts_do_not_match_is_named():
    def work(transport):
        counts = (2, 1 + transport.rank)
        n = sum(counts)
        group = transport.group((0, 1), "data")
        group.bind_all_to_all(np.zeros(n), counts, np.zeros(n), counts)().wait()

    with pytest.raises(TaskError, match="member 0 sends 1 elements to member 1, which expects 2"):
        run_local(2, work)


def test_ranks_in_different_control_messages_are_named():
    def work(transport):
        if transport.rank == 2:
            transport.gather(b"")
        else:
            transport.all_gather(b"")

    with pytest.raises(TaskError, match="rank 0 is in all_gather, rank 2 in gather"):
        run_local(3, work)


def test_groups_that_do_not_fit_are_named():
    with pytest.raises(TaskError, match=r"\(1, 2\).*\(0, 1\).*plans of the ranks differ"):
        run_local(3, lambda t: t.group((0, 1) if t.rank < 2 else (1, 2), "data"))


# Launching. A case is (variables, size of the MPI world); sizes as the launchers set them.

SRUN_WITHOUT_PMI = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "n"}, "PMIX_RANK=1"),
        (SRUN_WITHOUT_PMI, "SLURM_NTASKS=2"),
        ({**SRUN_WITHOUT_PMI, "SLURM_STEP_NUM_TASKS": "3"}, "SLURM_STEP_NUM_TASKS=3"),
    ],
)
def test_ranks_that_are_alone_though_several_were_started_are_refused(environment, variable):
    with pytest.raises(LaunchError) as caught:
        check_world(1, environment, "MPICH Version: 5.0.2")
    for part in ("world of 1 rank,", variable, "MPICH Version: 5.0.2", "srun --mpi=list"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, 1),
        ({**SRUN_WITHOUT_PMI, "SLURM_STEP_ID": str(0xFFFFFFFA)}, 1),
        ({**SRUN_WITHOUT_PMI, "PMI_SIZE": "1"}, 1),
        ({**SRUN_WITHOUT_PMI, "PMIX_RANK": "1"}, 2),
        ({**SRUN_WITHOUT_PMI, "SLURM_NTASKS": "1"}, 1),
        ({"PMI_SIZE": "4"}, 4),
    ],
)
def test_a_world_that_the_launcher_meant_is_accepted(environment, size):
    check_world(size, environment, "any")


def test_a_shell_in_a_job_expects_no_ranks():
    assert expected_ranks({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}) is None


def test_another_rank_count_than_the_plan_names_is_refused_on_all_ranks():
    def work(transport):
        with pytest.raises(LaunchError, match=r"the plan is for 2 ranks, 3 were started"):
            check_ranks(transport, 2)
        check_ranks(transport, 3)

    run_local(3, work)


def test_the_launcher_is_not_believed_where_mpi4py_is_missing(pytestconfig):
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from mpiflow.exec.launch import connect\n"
        "t = connect(); print(type(t).__name__, t.rank, t.size)"
    )

    def run(**variables):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": pytestconfig.rootpath, **variables}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )

    assert run().stdout == "LocalTransport 0 1\n"
    refused = run(OMPI_COMM_WORLD_SIZE="2")
    assert refused.returncode == 1
    assert "OMPI_COMM_WORLD_SIZE=2), but mpi4py does not work" in refused.stderr


# Threads.


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"MPI_LOCALNRANKS": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, 2),
        ({"SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "12"}, 12),
        ({"SLURM_TASKS_PER_NODE": "12"}, 1),
    ],
)
def test_local_ranks_are_read_from_the_launcher(environment, ranks):
    assert local_ranks(environment) == ranks


def test_ranks_on_one_host_share_its_cpus():
    ranks = 2 * usable_cpus()
    environment = {"MPI_LOCALNRANKS": str(ranks), "MKL_NUM_THREADS": "7"}
    limit_threads(environment)
    assert environment["MKL_NUM_THREADS"] == "7"
    if usable_cpus() > 1:
        assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
    assert threads_per_rank({"MPI_LOCALNRANKS": "2"}) == max(1, usable_cpus() // 2)
    assert threads_per_rank({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "1"}) == 1


def test_a_rank_with_all_cpus_is_not_limited():
    environment = {}
    limit_threads(environment)
    assert environment == {}


def test_the_user_is_told_what_a_rank_computes_with():
    ranks = 2 * usable_cpus()
    environment = {"MPI_LOCALNRANKS": str(ranks)}
    said = f"each rank computes with 1 thread ({usable_cpus()} CPU"
    assert describe_threads(environment).startswith(said)
    assert f"for {ranks} ranks of this host; OMP_NUM_THREADS" in describe_threads(environment)
    environment["OMP_NUM_THREADS"] = "7"
    assert describe_threads(environment) == (
        "each rank computes with 7 threads, as OMP_NUM_THREADS says; its share of the CPUs is 1"
    )


def test_limiting_threads_needs_the_standard_library_only(pytestconfig):
    program = "import runpy, sys; runpy.run_path('mpiflow/threads.py'); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=pytestconfig.rootpath, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not {"numpy", "mpiflow"} & set(done.stdout.split())


def test_a_world_of_one_needs_no_threads():
    transport = LocalWorld(1).transports[0]
    buffer = np.arange(3.0)
    transport.group((0,), "data").bind_all_reduce(buffer)().wait()
    assert list(buffer) == [0.0, 1.0, 2.0]
    transport.close()
