"""metrics.jsonl has every step once, whatever a killed run left in it."""

import json

from mpiflow.metrics import Metrics, cut, ended

STEP = {"step": 1, "epoch": 1, "loss": 0.5, "seconds": 0.1}
EVALUATION = {"evaluation": "test", "step": 1, "epoch": 1, "rows": 3, "loss": 0.4}
LAST = {"peak_bytes": {"host": 1}, "bytes_sent": 0, "predicted": {}}


def write(path, rows, more=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + more)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def three_steps():
    return [{**row, "step": step} for step in (1, 2, 3) for row in (STEP, EVALUATION)]


def test_rows_are_appended(tmp_path):
    for row in (STEP, EVALUATION):
        metrics = Metrics(tmp_path / "m.jsonl")
        metrics.add(row)
        metrics.close()
    assert read(tmp_path / "m.jsonl") == [STEP, EVALUATION]


def test_sync_puts_rows_on_the_disk(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.add(STEP)
    metrics.sync()
    assert read(tmp_path / "m.jsonl") == [STEP]
    metrics.close()


def test_cut_keeps_a_step_and_what_was_evaluated_after_it(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [*three_steps(), LAST], more='{"step": 4, "los')
    assert cut(path, 2) == 1
    assert read(path) == three_steps()[:4]
    assert cut(path, 2, evaluations=False) == 0
    assert read(path) == three_steps()[:3]
    assert cut(path, 0) == 2
    assert path.read_text() == ""


def test_cut_drops_lines_that_are_no_objects(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'3\n[1]\n\xff\xfe\n\n"x"\n' + json.dumps(STEP).encode() + b"\n")
    cut(path, 5)
    assert read(path) == [STEP]


def test_nothing_to_cut_where_there_is_no_file(tmp_path):
    assert cut(tmp_path / "none", 3) == 0
    assert not ended(tmp_path / "none", 3)


def test_a_run_ended_where_its_last_object_follows_the_step(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [*three_steps(), LAST])
    assert ended(path, 3)
    assert not ended(path, 2)
    write(path, three_steps())
    assert not ended(path, 3)
    write(path, [LAST])
    assert not ended(path, 0)
