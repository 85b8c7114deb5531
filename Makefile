# make demo    train on handwritten digits with two ranks, from a plan compiled beforehand
# make test    the checks below, then every test that this machine can run; PYTEST= options for it
# make check   ruff and mypy
# make clean   remove what these made, .venv included
#
# Nothing is needed but make and Python 3.11 or later; PYTHON= names it, VENV= where to install.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet

# mpiexec finds its own helpers, and the tests find mpiexec; each rank has one BLAS thread.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export OMP_NUM_THREADS = 1
export OPENBLAS_NUM_THREADS = 1

# So many processes run tests: one for each CPU. Another number: make test PYTEST='-n 4'
AT_ONCE = -n auto --maxprocesses 8

# What runs on the fake device too. All of it: pytest tests/local tests/mpi --device fake
ON_FAKE = tests/local/test_assign.py tests/local/test_microbatches.py tests/mpi/test_cli_weights.py \
    tests/mpi/test_cli_pipeline.py::test_a_run_goes_on_from_stages_to_others_and_back

.PHONY: demo test check clean
.DELETE_ON_ERROR:

demo: digits/.packed
	$(BIN)/mpiflow plan examples/digits.py --ranks 2 -o run/digits.plan
	$(BIN)/mpiexec -n 2 $(BIN)/mpiflow run run/digits.plan --fresh

test: check
	$(BIN)/python -m pytest -q $(AT_ONCE) --device fake $(ON_FAKE)
	$(BIN)/python -m pytest $(AT_ONCE) $(PYTEST)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) digits run/digits run/digits.* build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

digits/.packed: examples/pack_digits.py | $(VENV)/.installed
	$(BIN)/python examples/pack_digits.py
	touch $@

# The files that end a recipe are stamps: what they stand for was finished.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[mpi,examples]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[mpi,examples,dev]'
	touch $(VENV)/.installed $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "mpiflow needs Python 3.11 or later: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
