# Two commands matter: `make run` and `make test`. Both start from nothing but Python and make.
PYTHON ?= python3
# CPU build by default: a bare "torch" brings gigabytes of CUDA packages. Override for a GPU machine: make TORCH=torch
TORCH ?= torch==2.13.0
# What `make test-versions` tests: the oldest torch that pyproject.toml allows, and the newest that installs.
TORCH_OLDEST ?= torch==2.6.0
TORCH_NEWEST ?= torch
PYTHON_OLDEST ?= $(PYTHON)
PYTHON_NEWEST ?= $(PYTHON)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Tests keep 2 cores busy, no more: several of them time real processes.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest
# First those that fork most: a fork copies more, the more the tests before it have imported.
TESTS ?= $(addprefix tests/,contract fault property e2e gpu unit)

.PHONY: run test test-versions coverage soak check format chromium clean

run: $(VENV)/.installed
	$(BIN)/penstock demo

test: $(VENV)/.dev chromium
	$(PYTEST) -n $(JOBS) --dist loadgroup -m "not gpu and not soak" $(TESTS)
	@echo "NOT RUN HERE (gpu: needs an NVIDIA GPU, soak: make soak), besides what is SKIPPED above:"
	@$(PYTEST) --collect-only -q -m "gpu or soak" $(TESTS) | grep :: || echo "  nothing"

# The web page is tested in a real browser. Without one its tests are skipped; the run goes on.
chromium:
	@command -v chromium google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "CHROMIUM COULD NOT BE INSTALLED (needs root and apt): the tests of the web page are skipped"

# Each torch has an environment of its own; the loader's behaviour is compared with that torch's own.
test-versions:
	$(MAKE) VENV=.venv-oldest TORCH="$(TORCH_OLDEST)" PYTHON="$(PYTHON_OLDEST)" TESTS="tests/contract tests/unit tests/fault" test
	$(MAKE) VENV=.venv-newest TORCH="$(TORCH_NEWEST)" PYTHON="$(PYTHON_NEWEST)" TESTS="tests/contract tests/unit tests/fault" test

# Apart from `make test`: tracing takes processor time in every worker, and some tests compare times.
coverage: $(VENV)/.dev
	COVERAGE_FILE=.coverage $(BIN)/coverage run -m pytest -q -m "not gpu and not soak" tests/contract tests/unit
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o - | $(BIN)/python tests/support/coverage_by_room.py

soak: $(VENV)/.dev
	$(PYTEST) -m soak

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python docs/line_links.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/line_links.py --write

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist .coverage* .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and on its own: an installed torch satisfies every later requirement for one.
$(VENV)/.torch: $(VENV)/bin/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[all]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[dev]"
	touch $@ $(VENV)/.installed
