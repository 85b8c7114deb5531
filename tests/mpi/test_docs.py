"""The documents are true: their programs are the files, their commands print what they say.

Run this file (`python tests/mpi/test_docs.py`) to write what the commands print now into them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("tour", "layouts", "ops", "pipelines", "search", "weights")
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.host("documents show plans for the host")


def run_console(block, folder):
    """What a block of `$ command` lines (continued by `> `) and their output becomes when run."""
    commands = []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append(line)
        elif line.startswith("> "):
            commands[-1] += "\n" + line
    text = ""
    for command in commands:
        script = "\n".join(line[2:] for line in command.splitlines())
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",
        }
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert not done.stderr, f"{command}\n{done.stderr}"
        output = "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")
        text += f"{command}\n{output}\n" if output else f"{command}\n"
    return text.replace(str(folder), "/home/me")


def document(name):
    return ROOT / "docs" / f"{name}.md"


def run_document(text, folder):
    (folder / "examples").symlink_to(ROOT / "examples")
    return CONSOLE.sub(lambda m: f"```console\n{run_console(m.group(1), folder)}```", text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_prints_what_it_says(tmp_path, name):
    text = document(name).read_text()
    assert run_document(text, tmp_path) == text


@pytest.mark.parametrize(
    ("document", "program"),
    [
        ("README.md", "digits"),
        ("docs/tour.md", "tour"),
        ("docs/ops.md", "own_op"),
        ("docs/weights.md", "finetune"),
    ],
)
def test_a_document_shows_the_program_as_it_is(document, program):
    assert (ROOT / "examples" / f"{program}.py").read_text() in (ROOT / document).read_text()


if __name__ == "__main__":
    import tempfile

    for name in DOCUMENTS:
        with tempfile.TemporaryDirectory() as folder:
            document(name).write_text(run_document(document(name).read_text(), Path(folder)))
