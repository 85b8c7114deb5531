"""A real Slurm for the tests: munged, slurmctld and two slurmd on this machine, in a folder of
their own, started once a session and stopped by the process ids that were started here."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2")
# The daemons are in sbin, which is not on every PATH.
SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue")
START_SECONDS = 30
ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"}

CONFIG = """\
ClusterName=mpiflow
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdLogFile={folder}/slurmd.%n.log
# More CPUs than the machine may have, so that 2 nodes x 4 CPUs exist on a laptop too.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
MpiDefault=none
# MPICH names its shared memory after the job id; what a killed job of an earlier session left
# behind under the same id would break MPI_Init.
FirstJobId={first_job}
ReturnToService=2
KillWait=5
MinJobAge=3600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What became of a batch job: Slurm's state, the exit code of its script, what it printed."""

    state: str
    exit_code: int
    output: str


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running cluster of two nodes with 4 CPUs each; `folder` holds its logs."""

    folder: Path

    def sbatch(self, script, *arguments, options=(), cwd):
        """Submits `script` from `cwd` with the Python of these tests first on PATH; its job id."""
        log = f"--output={cwd}/%j.out"
        command = ["sbatch", "--parsable", log, *options, str(script), *map(str, arguments)]
        return self._run(*command, cwd=cwd).strip()

    def run(self, script, *arguments, options=(), cwd):
        """The finished job of `script`; started anew where Slurm lost a line of MPI's start.

        MPICH sends 4,096 bytes a node, its own address and whatever lies behind it in memory, in
        lines that Slurm's pmi2 reads up to byte 1,024: seldom, and by chance, one is longer.
        """
        for _ in range(3):
            job = self.wait(self.sbatch(script, *arguments, options=options, cwd=cwd))
            if "mpi/pmi2: invalid client request" not in job.output:
                break
        return job

    def wait(self, job, seconds=120):
        """The finished `job`; one that is not over within `seconds` is cancelled, and an error."""
        end = time.monotonic() + seconds
        while True:
            fields = self._run("scontrol", "show", "job", job, "--oneliner")
            state = re.search(r"JobState=(\S+)", fields).group(1)
            if state not in ACTIVE:
                break
            if time.monotonic() > end:
                self._run("scancel", job)
                raise TimeoutError(f"job {job} is {state} after {seconds} s\n{fields}")
            time.sleep(0.1)
        code = int(re.search(r" ExitCode=(\d+):", fields).group(1))
        log = Path(re.search(r"StdOut=(\S+)", fields).group(1))
        return Job(state, code, log.read_text() if log.exists() else "")

    def signal(self, job, name):
        """Sends the signal to every rank of `job`, not to its batch script."""
        self._run("scancel", f"--signal={name}", job)

    def _run(self, *command, cwd=None):
        done = subprocess.run(
            command, cwd=cwd, env=self.environment(), capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
        return done.stdout

    def environment(self):
        """This process's variables, pointed at this cluster and at the mpiflow of this tree."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI_"))}
        return inherited | {
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{SEARCH}",
        }


@pytest.fixture(scope="session")
def slurm():
    """A Slurm of two idle nodes; skips where it cannot be run."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=SEARCH)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root to start jobs")
    # Not pytest's own folder: the path of a unix socket ends at 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as name,
        contextlib.ExitStack() as daemons,
    ):
        cluster = Slurm(Path(name))
        _write_files(cluster.folder)
        _start_all(cluster, daemons)
        yield cluster
        cluster._run("scancel", "--me")
        _wait_until(lambda: not cluster._run("squeue", "--noheader"), "all jobs are gone", cluster)


def _write_files(folder):
    ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=8000"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    names = {"host": host, "control": ports[0], "folder": folder, "nodes": nodes}
    text = CONFIG.format(first_job=random.randrange(10**6, 6 * 10**7), **names)
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "bin").mkdir()
    program = folder / "bin/mpiflow"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mpiflow "$@"\n')
    program.chmod(0o755)


def _start_all(cluster, daemons):
    """Starts the four daemons; `daemons` stops them, last one first."""
    at = cluster.folder
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    options = [f"--{option}={at}/munge.{end}" for option, end in munge.items()]
    commands = [
        # --force: run as root and in a folder that others might write.
        ("munged", "--foreground", "--force", f"--log-file={at}/munged.log", *options),
        ("slurmctld", "-D", "-f", f"{at}/slurm.conf"),
        *(("slurmd", "-D", "-N", node, "-f", f"{at}/slurm.conf") for node in NODES),
    ]
    for command in commands:
        daemons.enter_context(_daemon(command, cluster))
        if command[0] == "munged":
            _wait_until((at / "munge.socket").exists, "munged listens", cluster)
    _wait_until(lambda: _idle(cluster) == len(NODES), "both nodes are idle", cluster)


@contextlib.contextmanager
def _daemon(command, cluster):
    with open(cluster.folder / "daemons.out", "ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=cluster.environment()
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(cluster):
    try:
        states = cluster._run("sinfo", "--noheader", "--Node", "--format=%t")
    except RuntimeError:  # slurmctld does not answer yet
        return 0
    return states.split().count("idle")


def _wait_until(condition, claim, cluster):
    end = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > end:
            logs = sorted([*cluster.folder.glob("*.log"), cluster.folder / "daemons.out"])
            tails = "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)
            raise TimeoutError(f"Slurm: not true within {START_SECONDS} s: {claim}\n{tails}")
        time.sleep(0.1)


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
