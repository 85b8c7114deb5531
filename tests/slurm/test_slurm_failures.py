"""What a batch job on a real Slurm says, and with which code it ends, when a rank of it fails."""

import re
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "mpi"))
from cli_job import ROOT, SITE, write_data, write_job

MULTI = ROOT / "slurm/multi-node.sbatch"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
ENDED = {137, 143}
"""What srun gives for ranks that it ended; it gives the largest code."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("points")
    write_job(folder, "evaluate=test, evaluate_every=mf.Every(steps=10**6)")
    write_data(folder)
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(SITE)
    return folder


def failed(slurm, folder, fault, *options):
    """The job with that fault in a rank, what mpiflow said, and the seconds until it ended."""
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    export = f"--export=ALL,PYTHONPATH={folder}/site:{ROOT},FAULT={fault},MARK={mark}"
    arguments = ("job.py", "--out", "run", "--fresh", "--steps", 10**6, *options)
    ended = slurm.run(MULTI, *arguments, options=(*TWO_BY_TWO, export), cwd=folder)
    seconds = time.time() - mark.stat().st_mtime
    said = re.findall(r"^(?:\d+: )?mpiflow: (.*)$", ended.output, re.MULTILINE)
    return ended, said, seconds


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("fault", "code", "sentence"),
    [
        ("0:SIGSTOP:40", 3, r"rank 0 \(\S+\), whose process is stopped, .* in task .*"),
        ("1:SIGKILL:40", 137, r"rank 1 \(\S+\), whose process is gone, has been silent .*"),
    ],
)
def test_one_sentence_says_who_is_at_fault(slurm, folder, fault, code, sentence):
    """And soon: a stall is certain after 5 s, or after 4 times the longest stand before, as where
    ranks share their CPUs; Slurm kills what does not end by itself 5 s later (its KillWait)."""
    ended, said, seconds = failed(slurm, folder, fault)
    assert (ended.state, ended.exit_code in {code, *ENDED}) == ("FAILED", True), ended
    assert len(said) == 1, ended.output
    assert re.fullmatch(sentence, said[0])
    assert seconds < 30
