"""Plans for accelerators: what is copied where, what is pinned, which route is taken."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from forced_layouts import forced
from jobs import CLASSES, EXAMPLES, FEATURES, classifier, compile_arrays, compile_for
from micro_jobs import arrays, job
from mutants import with_program, with_register, with_task, without_task
from pipeline_jobs import tied

import mpiflow as mf
from mpiflow.cli import main
from mpiflow.errors import VerifyError
from mpiflow.plan.places import D2H, FEED, H2D, NCCL, PINNED, STAGED
from mpiflow.plan.simulator import simulate
from mpiflow.plan.store import dumps, loads
from mpiflow.plan.verify import verify

DECLARED = EXAMPLES.parent / "tests/golden/declared.py"


@pytest.fixture(scope="module")
def staged():
    return compile_for("data=2", classifier(), route=STAGED)


@pytest.fixture(scope="module")
def nccl():
    return compile_for("data=2", classifier(), route=NCCL)


def task_of(program, kind, stream=""):
    return next(t for t in program.tasks if t.kind == kind and stream in ("", t.stream))


def place(program, name):
    return next(i for i, task in enumerate(program.tasks) if task.name == name)


def pinned_bytes(plan, program):
    names = {r.name: r for r in plan.program(program).registers if r.space == PINNED}
    return {name: r.nbytes * r.slots for name, r in names.items()}


@pytest.mark.parametrize("route", [STAGED, NCCL])
@pytest.mark.parametrize("mesh", ["data=1", "data=2", "data=2,model=2"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_proven_plan_comes_back_from_its_file(route, mesh, zero):
    plan = compile_for(mesh, classifier(), zero=zero, route=route)
    assert loads(dumps(plan)) == plan
    assert [name for name, _ in plan.arenas] == ["accelerator", "pinned"]


@pytest.mark.parametrize("route", [STAGED, NCCL])
@pytest.mark.parametrize("mesh", ["data=2", "stage=2", "stage=2,model=2"])
def test_micro_batches_and_stages_are_proven_too(route, mesh):
    plan = compile_arrays(mesh, job(partial(tied, dtype="float32"), 24, 4), arrays(24), route=route)
    between = [t for p in plan.programs for t in p.tasks if t.route]
    assert between
    assert {t.route for t in between} == {route}
    sizes = dict(plan.arenas)
    if plan.mesh.stages > 1:
        assert sizes["pinned"] == max(sizes["pinned.0"], sizes["pinned.1"])
        assert {t.kind for t in between} >= {"send", "receive"}


def test_what_is_read_goes_through_pinned_slots_ahead_of_the_step(staged):
    program = staged.program("train")
    read, feed = task_of(program, "read"), task_of(program, H2D, FEED)
    assert read.outputs == feed.inputs == ("batch/image@pinned", "batch/label@pinned")
    assert feed.outputs == ("batch/image", "batch/label")
    slots = {r.name: (r.slots, r.space) for r in program.registers}
    assert slots["batch/image@pinned"] == (2, PINNED)
    assert slots["batch/image"] == (2, "")


def test_a_staged_bucket_is_one_piece_in_both_memories(staged):
    program = staged.program("train")
    registers = {r.name: r for r in program.registers}
    reduce = program.tasks[place(program, "bucket.data.0")]
    down = next(t for t in program.tasks if t.kind == D2H and t.outputs == reduce.inputs)
    up = next(t for t in program.tasks if t.kind == H2D and t.inputs == reduce.outputs)
    assert len(reduce.inputs) > 3
    for names in (down.inputs, down.outputs, up.inputs, up.outputs):
        places = [(registers[n].offset, registers[n].nbytes) for n in names]
        assert all(a + size == b for (a, size), (b, _) in pairwise(places))
    assert [registers[n].aliases for n in up.outputs] == list(down.inputs)


def test_with_nccl_only_what_the_host_wants_is_copied(nccl):
    copies = [t.name for t in nccl.program("train").tasks if t.kind in (H2D, D2H)]
    assert copies == ["h2d read train", "d2h outputs"]


def test_all_outputs_come_to_the_host_in_one_copy(staged):
    program = staged.program("evaluate")
    spaces = {r.name: r.space for r in program.registers}
    assert len(program.outputs) == 3
    assert {spaces[o.register] for o in program.outputs} == {PINNED}
    assert len([t for t in program.tasks if t.name == "d2h outputs"]) == 1


def test_pinned_memory_is_what_lies_in_it_to_the_byte(nccl):
    """Slots of reads and what is stored have places of their own, aligned to 64 bytes."""
    sizes = [
        size
        for name in ("train", "evaluate", "evaluate_tail", "save")
        for register, size in pinned_bytes(nccl, name).items()
        if register.startswith(("batch/", "save/"))
    ]
    lasting = sum(-(-size // 64) * 64 for size in sizes)
    outputs = max(len(p.outputs) for p in nccl.programs)
    assert lasting + 64 * (outputs - 1) < nccl.arena(PINNED) <= lasting + 64 * outputs
    end = max(r.offset + r.nbytes * r.slots for p in nccl.programs for r in p.registers
              if r.space == PINNED)  # fmt: skip
    assert nccl.arena(PINNED) == end


def test_few_parts_of_variables_are_on_the_device_on_their_way_to_a_checkpoint(nccl):
    save = nccl.program("save")
    cut = [t for t in save.tasks if t.op == "Slice"]
    assert len(cut) > 4
    assert all(t.after for t in cut[2:])
    assert {r.space for r in save.registers if r.name.endswith("@pinned")} == {PINNED}


def test_a_variable_that_is_sent_and_then_comes_back_changed_has_a_place_for_each():
    with forced(2):
        plan = compile_for("data=2,model=2", classifier(48, optimizer=mf.Adam(0.1)), route=STAGED)
    tasks = plan.program("train").tasks
    copies = {
        t.kind: t for t in tasks if "fc1.weight" in (t.inputs if t.kind == D2H else t.outputs)
    }
    assert "fc1.weight@pinned" in copies[D2H].outputs
    assert "fc1.weight@pinned.new" in copies[H2D].inputs


def test_copies_are_predicted_to_run_beside_kernels():
    """What the next step reads is on the device before that begins."""
    plan = compile_for("data=2", classifier(width=512), route=STAGED)
    train = simulate(plan, "train", 5)
    feed = next(e for e in train.events if e.step == 4 and e.stream == FEED)
    assert feed.stop < train.ends[3]
    kernels = [e for e in train.events if e.stream == "compute"]
    assert any(e.start < feed.stop and feed.start < e.stop for e in kernels)


def test_a_plan_for_the_host_has_one_arena_and_no_routes():
    plan = compile_for("data=2", classifier())
    assert [name for name, _ in plan.arenas] == ["host"]
    assert not [t for p in plan.programs for t in p.tasks if t.route or t.kind in (H2D, D2H)]


def _kernel_reads_pinned(program):
    kernel = place(program, "cast")
    return with_task(program, kernel, inputs=("batch/image@pinned",))


def _copy_removed(program):
    return without_task(program, place(program, "h2d read train"))


def _refilled_early(program):
    """The second slot of what is read lies over the first of another field."""
    image = next(r for r in program.registers if r.name == "batch/image@pinned")
    return with_register(program, "batch/label@pinned", offset=image.offset)


def _staged_without_copy(program):
    source = program.tasks[place(program, "bucket.data.0")].inputs[0]
    return with_register(program, source, space="")


def _other_route(program):
    return with_task(program, place(program, "bucket.data.0"), route=NCCL)


def _another_shape(program):
    return with_register(program, "batch/label", dtype="uint64")


def _no_slot(program):
    names = task_of(program, H2D, FEED)
    swapped = (names.inputs[1], names.inputs[0])
    return with_task(program, place(program, names.name), inputs=swapped)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (_kernel_reads_pinned, "cast .*takes batch/image@pinned, which lies in pinned memory"),
        (_copy_removed, "no task produces register batch/image"),
        (_refilled_early, "batch/label@pinned .*keeps its memory to itself"),
        (_staged_without_copy, "lies in device memory; it can only reach pinned memory"),
        (_other_route, "bucket.data.0.*takes .*pinned memory; it can only reach device"),
        (_another_shape, "copies batch/label@pinned, .* not the same tensor"),
        (_no_slot, "not the same tensor"),
    ],
)
def test_a_planted_fault_is_refused(staged, plant, says):
    program = staged.program("train")
    with pytest.raises(VerifyError, match=says):
        verify(with_program(staged, program, plant(program)))


def test_products_of_16_bits_need_no_copies_on_accelerators():
    job = replace(classifier(40), precision="float16")

    def workspaces(**more):
        tasks = compile_for("data=2", job, **more).program("train").tasks
        return {t.workspace[1] for t in tasks if t.op in ("Linear", "RowProduct")}

    assert workspaces(route=NCCL) == {0}
    assert min(workspaces()) > 0


def test_an_update_is_one_block_on_accelerators():
    """What suits the caches of a CPU is a launch of a dozen kernels on a GPU."""
    job = classifier(40, width=9000)

    def workspaces(**more):
        tasks = compile_for("data=2", job, **more).program("train").tasks
        return [t.workspace[1] for t in tasks if t.op == "SgdUpdate"]

    weights = 9000 * (FEATURES + 1 + CLASSES) + CLASSES
    assert sum(workspaces(route=NCCL)) == 2 * 4 * weights
    assert {*workspaces()} == {2 * 4 * 2**15}


def test_nccl_and_mpi_between_the_same_devices_are_refused(nccl):
    program = nccl.program("evaluate")
    mixed = replace(
        program, tasks=tuple(replace(t, route="mpi" if t.route else "") for t in program.tasks)
    )
    with pytest.raises(VerifyError, match="can wait for each other"):
        verify(with_program(nccl, program, mixed))


def test_what_mpi_sends_to_be_summed_needs_a_place():
    plan = compile_for("data=2", classifier(), route="mpi")
    program = plan.program("train")
    at = place(program, "bucket.data.0")
    task = program.tasks[at]
    verify(plan)
    for fault, message in (
        ({"attributes": task.attributes | {"received": 256}}, "receives .* bytes to sum"),
        (
            {"workspace": (task.workspace[0], task.workspace[1] - 4)},
            "receives .* bytes to sum",
        ),
        ({"attributes": task.attributes | {"received": "x"}}, "from byte 'x' of its workspace"),
        ({"attributes": task.attributes | {"received": 2}}, "no place of float32 elements"),
    ):
        with pytest.raises(VerifyError, match=message):
            verify(with_program(plan, program, with_task(program, at, **fault)))


def test_what_mpi_sends_to_be_summed_may_not_come_where_a_collective_packs():
    plan = compile_for("data=2", classifier(width=64), zero=1, route="mpi")
    program = plan.program("train")
    scatters = [t for t in program.tasks if t.op == "reduce_scatter" and len(t.inputs) > 1]
    verify(plan)
    at = place(program, scatters[0].name)
    fault = {"attributes": program.tasks[at].attributes | {"received": 0}}
    with pytest.raises(VerifyError, match="packs"):
        verify(with_program(plan, program, with_task(program, at, **fault)))


def test_what_nccl_lacks_is_a_note_with_its_price():
    plan = compile_for("data=3", classifier(optimizer=mf.SGD(lr=0.1)), route=NCCL)
    (note,) = [note for note in plan.notes if "NCCL has none" in note]
    assert "uneven all_gather along data" in note
    assert "us predicted a step" in note


def test_the_command_line_plans_for_cuda_where_there_is_none(capsys):
    command = ["plan", str(DECLARED), "--ranks", "2", "--cluster", "h100", "--device", "cuda"]
    assert main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["predicted"]["peak_bytes"]) == {"accelerator", "pinned"}
    assert made["memory"][0]["pinned_bytes"] == made["predicted"]["peak_bytes"]["pinned"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "comm.data nccl" in shown
    assert "accelerator arena" in shown
    assert main([*command, "--route", "staged"]) == 0
    assert "comm.data staged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "tpu"], "--device tpu: there are cpu, fake, cuda"),
        (["--route", "nccl"], "give --device cuda, or fake"),
        (["--device", "fake", "--route", "rdma"], "there are nccl, mpi, staged"),
    ],
)
def test_what_cannot_be_meant_is_said(options, says, capsys):
    assert main(["plan", str(DECLARED), "--ranks", "2", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.fixture(scope="module")
def strided():
    """Stages of which one splits columns, and the other rows."""
    mesh = "stage=2,data=2,model=1+2"
    return compile_arrays(mesh, job(partial(tied, dtype="float32"), 24, 2), arrays(24), route=NCCL)


def test_parts_that_are_no_run_of_memory_are_staged_whatever_the_route_and_a_note_says_so(strided):
    messages = [
        (t.kind, t.stream.endswith(".host"))
        for p in strided.programs for t in p.tasks
        if t.kind in ("send", "receive") and t.route == STAGED
    ]  # fmt: skip
    assert {kind for kind, _ in messages} == {"send", "receive"}
    assert all(beside for _, beside in messages)
    assert any("no run of memory: staged" in note for note in strided.notes)


def test_parts_that_are_no_run_of_memory_are_refused_by_another_route(strided):
    program = next(p for p in strided.programs if (p.name, p.stage) == ("train", 0))
    at = next(i for i, t in enumerate(program.tasks) if t.kind == "send" and t.route == STAGED)
    with pytest.raises(VerifyError, match="do not lie side by side; only staged can"):
        verify(with_program(strided, program, with_task(program, at, route=NCCL)))


def test_what_the_host_starts_is_refused_on_a_stream_of_the_device(strided):
    program = next(p for p in strided.programs if (p.name, p.stage) == ("train", 0))
    (host,) = {t.stream for t in program.tasks if t.kind == "send" and t.route == STAGED}
    stream = host.removesuffix(".host")
    mixed = replace(
        program,
        tasks=tuple(replace(t, stream=stream if t.stream == host else t.stream)
                    for t in program.tasks),
        order=tuple((s, o + dict(program.order)[host] if s == stream else o)
                    for s, o in program.order if s != host),
    )  # fmt: skip
    with pytest.raises(VerifyError, match=f"both on stream {stream}, one of route nccl"):
        verify(with_program(strided, program, mixed))
