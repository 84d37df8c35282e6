# Two commands matter: `make run` and `make test`. Both start from nothing but Python and make.
PYTHON ?= python3
# CPU build by default: a bare "torch" brings gigabytes of CUDA packages. Override for a GPU machine: make TORCH=torch
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Tests keep 2 cores busy, no more: several of them time real processes.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest

.PHONY: run test soak check format clean

run: $(VENV)/.installed
	$(BIN)/penstock demo

test: $(VENV)/.dev
	$(PYTEST) -n $(JOBS) --dist loadgroup -m "not gpu and not soak"
	@echo "NOT RUN HERE (gpu: needs an NVIDIA GPU, soak: make soak), besides what is SKIPPED above:"
	@$(PYTEST) --collect-only -q -m "gpu or soak" | grep :: || echo "  nothing"

soak: $(VENV)/.dev
	$(PYTEST) -m soak

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

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
