"""Memory that outlives a step belongs to its program alone."""

from dataclasses import replace

import pytest

from mpiflow.errors import VerifyError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B
from mpiflow.plan.records import Program, Register, Task
from mpiflow.plan.verify_between import check_between


class Programs:
    def __init__(self, *programs):
        self.programs = programs
        self.mesh = Mesh((("data", 1),))


def program(name, offset, *, stream):
    register = Register(f"{name}/r", (4,), "float32", (B,), offset, 16, slots=2)
    return Program(name, 4, (register,), (Task("t", "x", stream, "x", outputs=(f"{name}/r",)),), ())


def test_read_slots_of_one_program_beside_those_of_another_are_accepted():
    check_between(Programs(program("a", 0, stream="read"), program("b", 32, stream="read")))


def test_programs_may_take_turns_in_memory_that_no_step_outlives():
    check_between(Programs(program("a", 0, stream="compute"), program("b", 16, stream="compute")))


@pytest.mark.parametrize("streams", [("read", "compute"), ("compute", "read"), ("read", "read")])
@pytest.mark.parametrize("offset", [0, 16, 28])
def test_shared_read_slots_are_refused_with_the_bytes(streams, offset):
    first, second = (program(n, o, stream=s)
                     for n, o, s in zip("ab", (0, offset), streams, strict=True))  # fmt: skip
    with pytest.raises(VerifyError, match=rf"bytes \[{offset}, 32\)"):
        check_between(Programs(first, second))


def test_a_workspace_in_read_slots_is_refused():
    other = program("b", 64, stream="compute")
    task = replace(other.tasks[0], workspace=(8, 4))
    with pytest.raises(VerifyError, match="workspace of t"):
        check_between(Programs(program("a", 0, stream="read"), replace(other, tasks=(task,))))
