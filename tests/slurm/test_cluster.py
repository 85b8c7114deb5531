"""The Slurm of these tests is a real one: two nodes, batch jobs, exit codes, PMI for MPI."""

import pytest

WORLD = "from mpi4py import MPI; print('rank', MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)"


def submit(slurm, folder, body, *options):
    script = folder / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{body}\n")
    return slurm.run(script, options=options, cwd=folder)


def test_a_batch_job_reaches_both_nodes(slurm, tmp_path):
    command = "srun sh -c 'echo $SLURMD_NODENAME'"
    job = submit(slurm, tmp_path, command, "--nodes=2", "--ntasks-per-node=1")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert sorted(job.output.split()) == ["n1", "n2"]


def test_an_exit_code_comes_back(slurm, tmp_path):
    job = submit(slurm, tmp_path, "exec srun sh -c 'exit 7'")
    assert (job.state, job.exit_code) == ("FAILED", 7), job.output


def test_a_start_that_slurm_spoilt_is_made_anew(slurm, tmp_path):
    spoilt = "touch spoilt; echo 'slurmstepd: error: mpi/pmi2: invalid client request'; exit 1"
    job = submit(slurm, tmp_path, f"[ -e spoilt ] && exit 0; {spoilt}")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output


@pytest.mark.ranks(4)
def test_pmi2_joins_the_ranks_of_two_nodes_to_one_world(slurm, tmp_path):
    command = f'srun --mpi=pmi2 python -c "{WORLD}"'
    job = submit(slurm, tmp_path, command, "--nodes=2", "--ntasks-per-node=2")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert sorted(job.output.splitlines()) == [f"rank {rank} of 4" for rank in range(4)]
