import json
import resource
from dataclasses import replace
from math import inf, nan

import handmade
import pytest
from mutants import with_program, with_task

from mpiflow.errors import PlanError
from mpiflow.plan import store

PLAN = handmade.dense()


@pytest.mark.parametrize("plan", [handmade.dense(), handmade.sharded(), handmade.chain(20)])
def test_round_trip_is_exact(plan):
    again = store.from_json(json.loads(store.canonical(plan)))
    assert again == plan
    assert store.canonical(again) == store.canonical(plan)


def test_files_hold_what_was_saved(tmp_path):
    store.save(PLAN, tmp_path / "a.plan")
    store.save(PLAN, tmp_path / "a.plan")
    assert store.load(tmp_path / "a.plan", version="0.1.0") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["a.plan"]
    content = json.loads((tmp_path / "a.plan").read_bytes())
    assert content["digest"] == store.digest(PLAN)


def test_canonical_bytes_are_plain_sorted_and_compact():
    text = store.canonical(replace(PLAN, notes=("Übung",))).decode("ascii")
    assert ": " not in text.replace("mesh: ", "")
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert '"slots":1' not in text
    assert '"flops"' not in text


def test_digest_covers_everything_and_program_digest_the_identity_only():
    other = replace(PLAN, machine="cluster")
    assert store.digest(other) != store.digest(PLAN)
    assert store.program_digest(other) == store.program_digest(PLAN)
    changed = replace(PLAN, identity=(*PLAN.identity, ("seed", "1")))
    assert store.program_digest(changed) != store.program_digest(PLAN)


def test_every_truncation_is_refused(tmp_path):
    store.save(PLAN, tmp_path / "a.plan")
    content = (tmp_path / "a.plan").read_bytes()
    for size in range(0, len(content) - 2, 97):
        with pytest.raises(PlanError, match="truncated or no plan"):
            store.loads(content[:size], name="a.plan")


def test_an_edit_is_refused_with_both_digests(tmp_path):
    store.save(PLAN, tmp_path / "a.plan")
    content = (tmp_path / "a.plan").read_bytes()
    edited = content.replace(b'"offset":128', b'"offset":136', 1)
    with pytest.raises(PlanError, match=f"digest in the file is {store.digest(PLAN)}, its content"):
        store.loads(edited)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        store.load(tmp_path / "none.plan")
    for content in (b"[1,2]", b"{}", b"\x89HDF", b"[" * 100_000, b'{"digest":3}'):
        with pytest.raises(PlanError):
            store.loads(content)


def test_other_formats_and_versions_are_named_with_both_values():
    data = store.to_json(PLAN)
    with pytest.raises(PlanError, match="has format 7, this mpiflow reads format 1"):
        store.from_json({**data, "format": 7})
    with pytest.raises(PlanError, match=r"made by mpiflow 0\.1\.0, this is mpiflow 0\.2\.0"):
        store.from_json(data, version="0.2.0")


def test_a_file_that_spells_out_defaults_is_refused():
    data = store.to_json(PLAN)
    data["programs"][1]["registers"][2]["slots"] = 1
    raw = store._dump(data)
    data["digest"] = store.sha256(raw).hexdigest()
    with pytest.raises(PlanError, match="spells out"):
        store.loads(store._dump(data))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_no_plan_is_written_that_could_not_be_read(tmp_path, seed):
    with pytest.raises(PlanError, match=f"seed is {seed}; a plan holds integers from 0"):
        store.save(replace(PLAN, seed=seed), tmp_path / "x.plan")
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_is_full_leaves_the_plan_that_was_there(tmp_path):
    path = tmp_path / "x.plan"
    store.save(PLAN, path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(PlanError, match=r"x\.plan: cannot be written: File too large"):
            store.save(replace(PLAN, job="another"), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in tmp_path.iterdir()] == ["x.plan"]
    assert path.read_bytes() == before


BAD = [
    ("programs[1].tasks[3].workspace", "x", "is text 'x', not a list"),
    ("programs[1].tasks[3].workspace", [1], "has 1 items, not 2"),
    ("programs[1].tasks[3].name", 3, "is an integer 3, not text"),
    ("programs[1].tasks[3].outputs[0]", None, "is null None, not text"),
    ("programs[1].tasks[3].seconds", -1.0, "must be a number from 0 to"),
    ("programs[1].tasks[3].seconds", 1e300, "must be a number from 0 to"),
    ("programs[1].tasks[3].seconds", nan, "must be a number"),
    ("programs[1].tasks[3].seconds", True, "is true or false True, not a number"),
    ("programs[1].registers[0].offset", -8, "is -8; it must be from 0"),
    ("programs[1].registers[0].offset", 2**63, "it must be from 0"),
    ("programs[1].registers[0].offset", 1.5, "is a number 1.5, not an integer"),
    ("programs[1].registers[0].offset", True, "not an integer"),
    ("programs[1].registers[0].dtype", "object", "which is not known"),
    ("programs[1].registers[0].layout", "S(0) Q", "which is not known"),
    ("programs[1].registers[0].shape[1]", "4", "not an integer"),
    ("programs[1].order[0][1][0]", -1, "is -1"),
    ("mesh[0]", ["data", 0], "1 or more ranks"),
    ("mesh[0]", ["a b", 2], "a name of its own"),
    ("arenas[0]", ["host", "x"], "not an integer"),
    ("settings.epochs", [], "is a list [], not an integer"),
    ("data[0].shuffle", 1, "not true or false"),
    ("variables[0].trainable", "no", "not true or false"),
    ("programs[0].tasks[0].attributes.key", {"a": 1}, "an attribute is"),
    ("programs[0].tasks[0].attributes.key", inf, "an attribute is"),
    ("programs[0].tasks[0].atributes", {}, "is no field of Task"),
    ("surplus", 1, "is no field of Plan"),
]


def put(data, path, value):
    keys = path.replace("[", ".[").split(".")
    for key in keys[:-1]:
        data = data[int(key[1:-1])] if key.startswith("[") else data[key]
    data[int(keys[-1][1:-1]) if keys[-1].startswith("[") else keys[-1]] = value


@pytest.mark.parametrize(("path", "value", "complaint"), BAD)
def test_a_bad_item_is_named_by_its_path(path, value, complaint):
    data = store.to_json(PLAN)
    put(data, path, value)
    with pytest.raises(PlanError) as caught:
        store.from_json(data)
    assert str(caught.value).startswith(path)
    assert complaint in str(caught.value)


def test_every_key_that_is_needed_is_missed():
    data = store.to_json(PLAN)
    needed = 0
    for key in data:
        shorter = {k: v for k, v in data.items() if k != key}
        if key not in ("format", "notes"):
            needed += 1
            with pytest.raises(PlanError, match=f"{key} is missing"):
                store.from_json(shorter)
    assert needed == 15


@pytest.mark.parametrize("value", [b"x", {"a": 1}, nan, object(), [1, {2}]])
def test_what_json_cannot_hold_is_refused_when_written(value):
    train = PLAN.program("train")
    plan = with_program(PLAN, train, with_task(train, 1, attributes={"odd": value}))
    with pytest.raises(PlanError, match=r"plan\.programs\[1\]\.tasks\[1\]\.attributes\.odd"):
        store.to_json(plan)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    store.save(PLAN, tmp_path / "a.plan")
    with pytest.raises(PlanError):
        store.save(replace(PLAN, seed="x"), tmp_path / "a.plan")
    (tmp_path / "folder.plan").mkdir()
    with pytest.raises(PlanError, match=r"folder\.plan: cannot be written: Is a directory"):
        store.save(PLAN, tmp_path / "folder.plan")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.plan", "folder.plan"]
    assert store.load(tmp_path / "a.plan") == PLAN
