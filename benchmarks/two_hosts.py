"""Two emulated hosts on this machine, joined by a link of 1 Gbit/s, and a job on both of them.

    python benchmarks/two_hosts.py [--rate 1gbit] [--each 1] COMMAND...    needs root, Linux, MPICH

Each host is a network namespace with a name of its own and one core of this machine; a pair of
virtual devices joins them, whose rate a token bucket limits. The command runs as one rank, or as
many as asked for, on each host; they talk by TCP. What was made is removed in the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HOSTS = ("10.77.41.1", "10.77.41.2")
_LAUNCH = """#!/bin/sh
# As ssh is called: options, host, command.
while [ "${{1#-}}" != "$1" ]; do shift; done
number=${{1##*.}}; shift
core=$(( (number - 1) % {cores} ))
exec ip netns exec {name}$number unshare --uts sh -c \\
  "hostname host$number; exec taskset -c $core $*"
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def join(name: str, rate: str) -> None:
    """Make both hosts and the link between them."""
    run("ip", "link", "add", f"{name}v1", "type", "veth", "peer", "name", f"{name}v2")
    for number, address in enumerate(HOSTS, 1):
        space, device = f"{name}{number}", f"{name}v{number}"
        run("ip", "netns", "add", space)
        run("ip", "link", "set", device, "netns", space)
        inside = ("ip", "netns", "exec", space)
        run(*inside, "ip", "address", "add", f"{address}/24", "dev", device)
        run(*inside, "ip", "link", "set", device, "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        run(*inside, "tc", "qdisc", "add", "dev", device, "root", *bucket)


def part(name: str) -> None:
    """Remove them; the devices go with the namespaces."""
    for number in (1, 2):
        subprocess.run(["ip", "netns", "delete", f"{name}{number}"], check=False)


def launch(name: str, folder: str, command: list[str], each: int) -> int:
    """The exit code of the command on both hosts."""
    script = Path(folder) / "launch"
    script.write_text(_LAUNCH.format(name=name, cores=os.cpu_count()))
    script.chmod(0o755)
    environment = {
        **os.environ, "UCX_TLS": "tcp,self", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    hosts = ["-hosts", ",".join(HOSTS), "-launcher", "ssh", "-launcher-exec", str(script)]
    # mpiexec is on the first host, where it starts a rank without the script.
    there = ["ip", "netns", "exec", f"{name}1", "unshare", "--uts", "sh", "-c",
             'hostname "$0"; exec "$@"', "host1", "taskset", "-c", "0"]  # fmt: skip
    ranks = ["-ppn", str(each), "-n", str(each * len(HOSTS))]
    start = [*there, "mpiexec", *hosts, "-localhost", HOSTS[0], *ranks, *command]
    return subprocess.run(start, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc has it")
    parser.add_argument("--each", type=int, default=1, help="ranks of each host, on its one core")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    name = f"mf{os.getpid() % 10_000}"
    try:
        join(name, given.rate)
        with tempfile.TemporaryDirectory() as folder:
            return launch(name, folder, given.command, given.each)
    finally:
        part(name)


if __name__ == "__main__":
    sys.exit(main())
