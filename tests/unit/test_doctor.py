"""Doctor says what is there, what is missing, and what to do about it."""

import json
import sys
from types import SimpleNamespace

from mpiflow import doctor
from mpiflow.cli import main


def test_every_finding_is_a_line_with_advice_where_it_is_not_well(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_mpi", lambda: doctor.Finding("MPI", "some MPI"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(__version__="3.1.6"))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok  numpy ") for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("NO  h5py "))
    assert lines[at + 1].split() == ["pip", "install", "'h5py>=3.10'"]
    at = next(i for i, line in enumerate(lines) if line.startswith("NO  mpi4py      3.1.6"))
    assert "--upgrade 'mpi4py>=4.1'" in lines[at + 1]


def test_json_is_one_object(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_mpi", lambda: doctor.Finding("MPI", "none", False, "install it"))
    assert main(["doctor", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    found = {f["what"]: f for f in json.loads(captured.out)["findings"]}
    assert found["MPI"] == {"what": "MPI", "found": "none", "ok": False, "advice": "install it"}
    assert {"mpiflow", "Python", "numpy", "h5py", "mpi4py", "launcher", "CPUs", "folder"} < {*found}


def test_the_mpi_library_is_named():
    finding = doctor._mpi()
    assert finding.ok
    assert "MPI" in finding.found
