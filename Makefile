# Every target makes and uses its own virtual environment, `.venv`, from the first Python that is new enough; `make
# PYTHON=python3.12 test` builds it from that one. The stamp file is newer than what the environment was installed
# from, so a change there installs again.

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHONS := python3 python3.13 python3.12 python3.11
PYTHON ?= $(or $(shell for each in $(PYTHONS); do $$each -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$each && break; done),python3)
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
# A file stays with one worker, which then makes what its tests share once.
WORKERS := -n 2 --dist loadfile
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench clean

help:
	@echo 'make demo      train an agent on FrozenLake, from nothing, and show before and after'
	@echo 'make test      the tests'
	@echo 'make test-all  the tests, slow ones included'
	@echo 'make check     format, lint and types'
	@echo 'make bench     the engine and a training step beside their peers'
	@echo 'make clean     remove .venv and what the tools left behind; runs/ stays'

# Each demo is a new run. `make demo RUN=runs/demo-...` goes on with one that was stopped.
demo: $(STAMP)
	$(BIN)/rllm train frozenlake --output $(RUN)

test: $(STAMP)
	$(BIN)/pytest $(WORKERS)

test-all: $(STAMP)
	$(BIN)/pytest $(WORKERS) -m ''

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	@set -e; for script in benchmarks/inference.py benchmarks/train_step.py; do echo "$(BIN)/python $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in first and alone: which of its builds (CPU, CUDA) is installed is then settled before anything that
# depends on it is resolved.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"$(PYTHON) is Python {sys.version.split()[0]}; rLLM needs 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo '[1/3] $(VENV): a virtual environment from $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)
	@echo '[2/3] $(TORCH) (the large one: a minute or two)'
	@$(PIP) install -c constraints.txt '$(TORCH)'
	@echo '[3/3] rllm[dev] at the versions of constraints.txt'
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
