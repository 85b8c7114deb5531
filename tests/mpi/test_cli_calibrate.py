"""`mpiflow calibrate` on real ranks, and plans from what it writes."""

import cli_job
import pytest

from mpiflow.compiler.machine import find_machine

pytestmark = pytest.mark.host("measures the host")


@pytest.mark.ranks(2)
def test_two_ranks_calibrate_and_train_by_the_file(mpiexec, tmp_path):
    out = tmp_path / "here.toml"
    done = mpiexec(2, "-m", "mpiflow", "calibrate", "-o", out, "--quick", timeout=300)
    assert done.returncode == 0, done.stdout
    for what in ("products in float32", "memory", "ops", "messages, inner", "all_reduce on 2 ranks",
                 "reading", "a rank's process", "one host"):  # fmt: skip
        assert what in done.stdout
    machine = find_machine(str(out))
    assert machine.name.startswith("here ")
    assert [(m.kind, m.members) for m in machine.inner.measured] == [
        ("all_reduce", 2), ("all_gather", 2), ("reduce_scatter", 2), ("all_to_all", 2),
    ]  # fmt: skip
    assert {"Linear", "Conv", "LayerNorm", "SgdUpdate", "Cosine"} <= set(machine.kernels)
    assert 30_000_000 < machine.process_bytes < 500_000_000

    cli_job.write_data(tmp_path)
    cli_job.write_job(tmp_path)
    rows = cli_job.Runner(mpiexec, tmp_path).train(2, "--cluster", out, "--steps", 3)
    assert rows[-1]["predicted"]["step_seconds"] > 0
