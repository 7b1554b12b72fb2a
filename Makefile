# `make quickstart` and `make test` work on a fresh machine with Python >= 3.10 and pip: the first
# call makes .venv, later calls reuse it.
#   make quickstart TORCH_INDEX=URL     (no GPU: the index of PyTorch's CPU wheels saves 2.5 GB)

VENV ?= .venv
PYTEST_ARGS ?=
export PYTHON VENV TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help venv install quickstart test test-all test-gpu lint types docs bench clean

help:
	@echo "make quickstart   install into $(VENV), train a small GPT twice, show the comparison"
	@echo "make test         install, run the CPU tests (pytest options: PYTEST_ARGS='-k codec')"
	@echo "make test-all     also the slow tests"
	@echo "make test-gpu     the tests that need CUDA devices"
	@echo "make lint types   ruff, codespell; mypy"
	@echo "make docs         the documentation in build/site, strictly"
	@echo "make bench        the benchmarks, at a size that suits this machine"
	@echo "make install      everything for development;  make venv: only an empty $(VENV)"
	@echo "make clean        remove build products and caches ($(VENV) stays)"

venv install lint types docs:
	@.ci/task $@

test test-all test-gpu:
	@.ci/task $@ $(PYTEST_ARGS)

quickstart:
	@.ci/task install-examples
	@$(VENV)/bin/python examples/quickstart.py

bench: install
	@if command -v nvidia-smi >/dev/null; then \
		$(VENV)/bin/python benchmarks/kernels.py && \
		$(VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node gpu \
			benchmarks/step_time.py; \
	else \
		echo "no GPU: a tiny model on two CPU ranks; kernels.py needs a GPU" && \
		$(VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
			benchmarks/step_time.py --tiny; \
	fi

clean:
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find lq_lightning kernels tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
