"""What `mpiflow plan --explain` shows is what the solver weighed, and what it would weigh else."""

import json
import re
from functools import cache
from math import inf
from pathlib import Path

import pytest
from jobs import classifier, compile_for, data_set, digits
from micro_jobs import WORDS, arrays, job, masked

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.budget import budget
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.explain import explain
from mpiflow.compiler.fit import Limit
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.signature import choose
from mpiflow.compiler.trace import trace
from mpiflow.compiler.whatif import forced
from mpiflow.errors import UsageError
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import B, S
from mpiflow.plan.records import DataSet, Field

HERE = Path(__file__).parent
MACHINE = find_machine("cpu")
CLOSE = 1e-9


def words(batch, dtype="float32"):
    """A transformer with a tied embedding."""
    table = nn.Embedding(WORDS, 8, name="words", dtype=dtype)
    x = table(batch["ids"])
    x = x + nn.MultiHeadAttention(8, 4, causal=True, name="attend")(nn.LayerNorm(name="norm")(x))
    x = x + nn.FeedForward(16, name="feed")(x)
    return {"loss": mf.mean_cross_entropy(table.as_logits(x), batch["ids"])}


def compiled(mesh, made, zero=0):
    """The placed graphs of a job on the rows of micro_jobs, by program."""
    placed = {}

    def keep(step, program, result):
        if step == "signatures":
            placed[program] = result

    rows = arrays(made.train.batch)
    fields = tuple(Field(name, a.shape[1:], a.dtype.name) for name, a in rows.items())
    train = DataSet("train", "r-*.h5", fields, (), len(rows["ids"]), made.train.batch, False, 0, 4,
                    4, "")  # fmt: skip
    target = Target(parse_mesh(mesh), MACHINE, zero=zero)
    compile_job(made, {"train": train}, target, observe=keep, folder=HERE)
    return placed


@cache
def digits_placed(mesh="data=2,model=2"):
    placed = {}

    def keep(step, program, result):
        if step == "signatures":
            placed[program] = result

    compile_for(mesh, digits(), rows=1437, test_rows=360, features=64, observe=keep)
    return placed


CASES = {
    "digits": digits_placed,
    "transformer": lambda: compiled("model=3", job(words, 24, 1, mf.AdamW(0.01, clip=1.0))),
    "micro-batches": lambda: compiled("model=2", job(lambda b: masked(b, "float32"), 24, 4)),
    "float16": lambda: compiled(
        "model=2", job(lambda b: masked(b, "float32"), 24, 1, precision="float16")
    ),
    "zero": lambda: compiled("data=3", job(words, 24, 1, mf.Adam(0.01)), zero=3),
}


@cache
def placed_of(case):
    return CASES[case]()


@pytest.mark.parametrize("case", CASES)
def test_the_prices_are_those_that_the_solver_weighed(case):
    placed = placed_of(case)
    names = placed["train"].problem
    found = [node.name for node in names.nodes] + list(names.graph.variables)
    for i, name in enumerate(found[::5]):
        shown = explain(placed, name, HERE, solved=1 if i % 8 else 3)
        chosen = next(c for c in shown.candidates if c.chosen)
        conversions = sum(c.seconds for c in (*shown.takes, *shown.gives))
        assert conversions == pytest.approx(chosen.conversions, rel=1e-6, abs=1e-12)
        assert chosen.total == pytest.approx(placed["train"].seconds, rel=CLOSE)
        totals = [c.total for c in shown.candidates if c.total is not None]
        assert totals == pytest.approx(sorted(totals), rel=CLOSE)
        assert chosen.total == min(totals) or shown.notes[0].startswith("the hint")
        assert json.loads(json.dumps(shown.plain(), allow_nan=False))["name"] == shown.name
        assert max(map(len, str(shown).splitlines())) <= 100


@pytest.mark.parametrize("case", CASES)
def test_what_was_chosen_is_the_best_of_those_where_it_is_forced(case):
    placed = placed_of(case)["train"]
    for index in range(0, len(placed.choice), len(placed.choice) // 2):
        total = forced(placed.problem, index, placed.choice[index]).total
        assert total == pytest.approx(placed.seconds, rel=CLOSE)


def test_a_candidate_costs_at_most_what_changing_it_alone_does():
    placed = digits_placed()
    for name in ("fc1.weight", "relu"):
        shown = explain(placed, name, HERE)
        (chosen,) = [c for c in shown.candidates if c.chosen]
        alone = chosen.total - chosen.kernels - chosen.conversions
        for candidate in shown.candidates:
            assert candidate.total <= (alone + candidate.kernels + candidate.conversions) * 1.000001


def test_what_is_impossible_is_shown_with_the_reason():
    placed = compiled("model=3", job(words, 24, 1, precision="float16"))
    shown = explain(placed, "attend.qkv/add", HERE)
    refused = {str(c.layouts): (c.total, c.remark) for c in shown.candidates if c.remark}
    reason = "parts in 16 bits are not added up, as each sum would be rounded"
    assert refused == {"P, P -> P": (inf, reason)}
    assert "x impossible" in str(shown)
    assert shown.candidates[-1].remark == reason
    assert shown.plain()["candidates"][-1]["total_seconds"] is None


def wide(batch):
    x = mf.relu(nn.Dense(300, name="wide")(mf.cast(batch["image"], "float32")))
    return {"loss": mf.mean(mf.cross_entropy(nn.Dense(5, name="out")(x), batch["label"]))}


def test_under_a_limit_a_candidate_that_cannot_fit_says_what_it_would_hold():
    made = mf.Job("wide", wide, train=mf.Dataset("x", batch=6), optimizer=mf.SGD(lr=0.1))
    free = place(made, "data=2", rows=6)
    peak = budget(free.problem).peak(free.choice)
    limit = Limit(0.6 * peak, free=True)
    tight = choose(free.graph, parse_mesh("data=2"), MACHINE, limit=limit)
    shown = explain({"train": tight}, "wide.weight", HERE)
    (whole,) = [c for c in shown.candidates if str(c.layouts) == "-> B"]
    assert (whole.chosen, whole.total) == (False, inf)
    assert re.fullmatch(r"does not fit: layouts hold [\d.]+ KiB then", whole.remark)
    assert shown.candidates[0].chosen
    assert any("were chosen to hold" in note for note in shown.notes)
    assert all(c.total >= tight.lower * (1 - CLOSE) for c in shown.candidates)


def hinted(hint, on):
    """Two layers, with a hint on the first one's weight or on what it gives."""

    def model(batch):
        x = mf.cast(batch["image"], "float32")
        h = mf.relu(nn.Dense(12, name="fc1", sbp=hint if on == "fc1.weight" else None)(x))
        if on == "relu" and hint is not None:
            mf.hint(h, hint)
        logits = nn.Dense(5, name="out")(h)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    return mf.Job("hinted", model, train=mf.Dataset("x", batch=63), optimizer=mf.SGD(lr=0.1))


def place(made, mesh, rows=63):
    graph = trace(made, data_set("train", 1000, rows), name="train", rows=rows, training=True)
    differentiate(graph, made.optimizer)
    return choose(graph, parse_mesh(mesh), MACHINE)


@pytest.mark.parametrize("mesh", ["model=2", "data=5,model=2", "model=2,other=2"])
@pytest.mark.parametrize("on", ["fc1.weight", "relu"])
def test_a_forced_candidate_costs_what_a_hint_that_asks_for_it_does(on, mesh):
    free = place(hinted(None, on), mesh)
    shown = explain({"train": free}, on, HERE, solved=100)
    names, best = parse_mesh(mesh).names, {}
    for candidate in shown.candidates:
        layout = candidate.layouts.outputs[0]
        best[layout] = min(best.get(layout, inf), candidate.total)
    asked = [x for x in best if "data" not in names or x[0] == B]
    assert len(asked) > 2
    for layout in asked[::2]:
        hint = dict(zip(names, layout, strict=True))
        hint.pop("data", None)  # a hint that names this axis allows other splits over it
        assert place(hinted(hint, on), mesh).seconds == pytest.approx(best[layout], rel=CLOSE)


@pytest.mark.parametrize("on", ["fc1.weight", "relu"])
def test_a_hint_is_told_with_its_line_and_what_would_be_without(on):
    shown = explain({"train": place(hinted({"model": S(0)}, on), "model=2")}, on, HERE, solved=100)
    free = place(hinted(None, on), "model=2")
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
                if ("sbp=hint if" if on == "fc1.weight" else "mf.hint(h") in text)  # fmt: skip
    assert shown.notes[0].startswith(f"the hint {{'model': S(0)}} at {Path(__file__).name}:{line}")
    (chosen,) = [c for c in shown.candidates if c.chosen]
    assert (chosen.layouts.outputs, chosen.remark) == (((S(0),),), "")
    others = [c for c in shown.candidates if c.layouts.outputs != ((S(0),),)]
    assert {c.remark for c in others} == {"not as hinted"}
    assert shown.candidates[0].total == pytest.approx(free.seconds, rel=CLOSE)
    assert "h not as hinted" in str(shown)


def test_a_hint_on_a_weight_is_lifted_from_what_the_optimizer_keeps_for_it_too():
    made = [job(lambda b, hint=hint: two(b, hint), 24, 1) for hint in ({"model": S(0)}, None)]
    with_hint, free = (compiled("model=2", each) for each in made)
    shown = explain(with_hint, "in.weight", HERE)
    assert shown.candidates[0].total == pytest.approx(free["train"].seconds, rel=CLOSE)


def two(batch, hint):
    x = mf.relu(nn.Dense(64, name="in", sbp=hint)(mf.cast(batch["x"], "float32")))
    return {"loss": mf.mean_cross_entropy(nn.Dense(5, name="out")(x), batch["label"], ignore=-1)}


def test_why_the_first_weight_of_digits_is_split_by_columns():
    shown = explain(digits_placed(), "fc1.weight", Path("/"))
    assert [str(c.layouts) for c in shown.candidates] == ["-> B S(1)", "-> B B", "-> B S(0)"]
    assert [c.nbytes for c in shown.candidates] == [32768, 65536, 32768]
    assert shown.candidates[0].chosen
    assert (shown.kind, shown.op, shown.axes) == ("variable", "", ("data", "model"))
    assert shown.where.endswith("digits.py:13")
    assert "over axis data a variable is whole" in shown.notes[0]


def test_what_is_updated_in_place_keeps_nothing_more():
    shown = explain(digits_placed(), "update/fc1.weight/sgd_update", HERE)
    assert [c.nbytes for c in shown.candidates if c.chosen] == [0]
    assert all(c.nbytes > 0 for c in shown.candidates if not c.chosen)


def test_a_conversion_is_told_as_the_plan_has_it():
    placed = {}
    made = compile_for(
        "data=3", classifier(), observe=lambda step, program, result: placed.update(
            {program: result} if step == "signatures" else {}
        ),
    )  # fmt: skip
    (given,) = [c for c in explain(placed, "grad/fc1/linear/row_product", HERE).gives if c.steps]
    (step,) = given.steps
    fused = [t for t in made.program("train").tasks if t.kind == "collective"]
    assert (step.op, step.axis, given.share) == ("all_reduce", "data", 0.3)
    assert sum(t.nbytes for t in fused) > step.nbytes == 4 * 2 * 28  # 42 numbers over 3 ranks


def test_micro_batches_count_each_firing():
    whole, cut = (
        compiled("model=2", job(lambda b: masked(b, "float32"), 24, n)) for n in (1, 4)
    )  # fmt: skip
    sums = [explain(x, "grad/in/linear/row_product", HERE).gives[0].steps for x in (whole, cut)]
    assert "Accumulate" not in {step.op for step in sums[0]}
    assert sums[1][0].op == "Accumulate"
    shown = explain(cut, "in/linear", HERE)
    assert shown.axes == ("micro", "model")
    assert any("micro-batches is settled before" in note for note in shown.notes)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("fc1/linear", "fc1/linear"),
        ("relu>S(0)B", "relu"),
        ("image", "batch/image"),
        ("batch/label", "batch/image"),
        ("accuracy", "scale.2"),
        ("evaluate:fc1.weight", "fc1.weight"),
        ("evaluate_tail:image", "batch/image"),
    ],
)
def test_names_of_nodes_tensors_fields_and_outputs_are_known(name, found):
    shown = explain(digits_placed(), name, HERE, solved=2)
    assert shown.name == found
    assert shown.program == (name.partition(":")[0] if ":" in name else "train")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc1", "the nearest are fc1/linear, fc1/add, fc1.weight, fc1.bias, fc1.weight.momentum"),
        ("fc1.wieght", "the nearest are fc1.weight, "),
        ("zzz", "none has a name like it. `--after signatures` shows all"),
        ("evaluate:fc1.weight.momentum", "program evaluate has no node, tensor or variable"),
        ("evalute:relu", "what other programs have is evaluate:NAME, evaluate_tail:NAME"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, message):
    with pytest.raises(UsageError) as caught:
        explain(digits_placed(), name, HERE)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--explain {name}: program ")


def test_the_layouts_of_variables_are_given_in_an_evaluation():
    shown = explain(digits_placed(), "evaluate:fc1.weight", HERE)
    assert len(shown.candidates) == 1
    assert "variables have the layouts that training gives them" in shown.notes


def test_no_more_are_solved_for_than_asked():
    shown = explain(digits_placed(), "fc1/linear", HERE, solved=3)
    assert len(shown.candidates) == 3
    assert shown.left_out > 0
    assert f"... and {shown.left_out} more" in str(shown)
