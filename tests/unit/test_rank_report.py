"""A test session ends with one line that counts the tests that ran on two or more ranks."""

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
FAILING = """
@pytest.mark.ranks(3)
def test_fails(): assert False

@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
"""


def lines_of_session(folder, text):
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text(CONFIG)
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)]
    # Without plugins it starts in half the time.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TESTS, "5 passed, 0 failed, 1 skipped; 3 of them ran on two or more ranks"),
        (TESTS + FAILING, "5 passed, 2 failed, 1 skipped; 3 of them ran on two or more ranks"),
    ],
    ids=["all pass", "some fail"],
)
def test_only_passed_tests_of_two_or_more_ranks_are_counted(text, line, tmp_path):
    closing, last = lines_of_session(tmp_path, text)[-2:]
    assert closing.startswith("====")
    assert "5 passed" in closing
    assert last == line
