# `make quickstart` and `make test` work on a fresh machine with Python >= 3.10 and pip: the first
# call makes .venv, later calls reuse it.
#   make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu     (no GPU: saves 2.5 GB)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# litdata requires torchvision but imports it only for images; a torchvision built for another torch
# breaks `import lightning`. So litdata is installed alone, with what it imports for token streams.
LITDATA_IMPORTS := boto3 filelock numpy requests
SOURCES := lq_lightning kernels tests examples benchmarks .ci

.DEFAULT_GOAL := help
.PHONY: help venv install quickstart test test-all test-gpu lint types bench clean

help:
	@echo "make quickstart   install into $(VENV), train a small GPT twice, show the comparison"
	@echo "make test         install, run the CPU tests (pytest options: PYTEST_ARGS='-k codec')"
	@echo "make test-all     also the slow tests"
	@echo "make test-gpu     the tests that need CUDA devices"
	@echo "make lint types   ruff, codespell; mypy"
	@echo "make bench        the benchmarks, at a size that suits this machine"
	@echo "make install      everything for development;  make venv: only an empty $(VENV)"
	@echo "make clean        remove build products and caches ($(VENV) stays)"

venv: $(VENV)/.made
install: $(VENV)/.dev

$(VENV)/.made:
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 needed, found " + sys.version if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip --clear $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

$(VENV)/.torch: $(VENV)/.made constraints.txt
	@echo "installing torch (the first time takes a minute or more)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.examples: $(VENV)/.torch pyproject.toml
	@echo "installing lq-lightning and what the examples use"
	@$(PIP) -e '.[examples]' $(LITDATA_IMPORTS)
	@$(PIP) --no-deps litdata
	@touch $@

$(VENV)/.dev: $(VENV)/.examples
	@echo "installing the development tools"
	@$(PIP) -e '.[dev]'
	@touch $@

quickstart: $(VENV)/.examples
	@$(BIN)/python examples/quickstart.py

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "run: ruff format"; exit 1; }
	@$(BIN)/codespell $(SOURCES) *.md docs

types: $(VENV)/.dev
	@.ci/types $(BIN)/mypy

bench: $(VENV)/.dev
	@$(BIN)/python benchmarks/kernels.py
	@$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/step_time.py --tiny

clean:
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find lq_lightning kernels tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
