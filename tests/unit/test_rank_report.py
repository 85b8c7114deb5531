"""A test session ends with a line that counts tests on several ranks; skips may be forbidden."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
CONFIG = "[pytest]\nmarkers = ranks(n): starts n ranks\naddopts = --strict-markers\n"
TESTS = """
import pytest

@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", [1, 2, 3])
def test_two(x): assert x

@pytest.mark.ranks(1)
def test_one(): pass

@pytest.mark.ranks(4)
@pytest.mark.skip
def test_skipped(): pass

def test_plain(): pass
"""
SKIPPED = "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass\n"
FAILING = """
@pytest.mark.ranks(3)
def test_fails(): assert False

@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
"""


def session(folder, files, *options):
    """A run of pytest, with the conftest of this project, on files (name -> text)."""
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text(CONFIG)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder), *options]
    # Without plugins it starts in half the time.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TESTS, "5 passed, 0 failed, 1 skipped; 3 of them ran on two or more ranks"),
        (TESTS + FAILING, "5 passed, 2 failed, 1 skipped; 3 of them ran on two or more ranks"),
    ],
    ids=["all pass", "some fail"],
)
def test_only_passed_tests_of_two_or_more_ranks_are_counted(text, line, tmp_path):
    closing, last = session(tmp_path, {"test_it.py": text}).stdout.splitlines()[-2:]
    assert closing.startswith("====")
    assert "5 passed" in closing
    assert last == line


PASSING = "def test_it(): pass\n"
MARKED = TESTS.replace("@pytest.mark.ranks(4)", "")


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (SKIPPED, "here/test_it.py would be skipped. Skipped: could not import 'no_such_module'"),
        (MARKED, "here/test_it.py::test_skipped would be skipped."),
        (None, "no-skips here/: there are no tests"),
    ],
    ids=["a file", "a test", "no file"],
)
def test_a_forbidden_skip_fails_the_session(here, message, tmp_path):
    files = {"there/test_other.py": SKIPPED, "test_top.py": PASSING}
    files |= {"here/test_it.py": here} if here else {}
    done = session(tmp_path, files, "--no-skips", "here")
    assert done.returncode
    assert message in done.stdout + done.stderr


def test_skips_elsewhere_are_no_failure(tmp_path):
    files = {"here/test_it.py": PASSING, "there/test_other.py": SKIPPED}
    done = session(tmp_path, files, "--no-skips", "here/")
    assert not done.returncode, done.stdout
    assert "1 passed, 0 failed, 1 skipped" in done.stdout
