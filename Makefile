# Every target sets up what it needs: on a fresh clone, `make test` is enough.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH ?=
MOMENTS ?= 50
PARTS ?=
SEED ?= $(shell date +%s)
TORCH ?= 2.15.0
WORKERS ?= 2

VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
OTHER := .venv-torch-$(TORCH)
LOWEST := .venv-lowest
NEWEST := .venv-newest
NEMO := .venv-nemo

# One thread: the ranks of a test share the cores. Offline: tests build their own tiny models.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test test-slow test-gpu test-long test-torch test-lowest test-newest faults lint format docs bench bench-gpu bench-smoke venv-nemo quickstart first-hour clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv (or bring it up to date) with the pinned versions; PYTHON=python3.12 chooses another

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev,docs]' -c constraints.txt
	@touch $@

test: $(STAMP) ## run the tests on this machine's CPU, WORKERS=2 files at a time; PYTEST_ARGS="-k name" chooses some
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-slow: $(STAMP) ## run the tests that take seconds each, as many minutes as all others: whole runs, as CI has them
	$(BIN)/python -m pytest -m "slow and not long" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-gpu: $(STAMP) ## run the tests that need CUDA (skipped without it)
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

test-long: $(STAMP) ## run the tests that take minutes, such as a resume from every layout in every other
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

test-torch: $(OTHER)/.installed ## run the tests with another torch, in an environment of its own; TORCH=2.15.0
	$(OTHER)/bin/python -m pytest -m "not long" $(PYTEST_ARGS)

$(OTHER)/.installed: pyproject.toml constraints.txt
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints.txt # torch 2.11 wants setuptools below 82
	$(OTHER)/bin/python -m pip install --quiet -e '.[dev]' torch==$(TORCH) -c $(OTHER)/constraints.txt
	@touch $@

test-lowest: $(LOWEST)/.installed ## run the tests with the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest -m "not long" $(PYTEST_ARGS)

$(LOWEST)/.installed: pyproject.toml constraints.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	sed -nE '/^dependencies/,/^\]/ s/^ *"([a-z0-9-]+)(\[[a-z]+\])?>=([0-9.]+).*/\1==\3/p' pyproject.toml > $(LOWEST)/lowest.txt
	grep -viE "^($$(cut -d= -f1 $(LOWEST)/lowest.txt | paste -sd '|')|setuptools)==" constraints.txt > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet -e '.[dev]' -r $(LOWEST)/lowest.txt -c $(LOWEST)/constraints.txt
	@touch $@

test-newest: $(NEWEST)/.installed ## run the tests with the newest versions that pyproject.toml allows, as pip installs them today
	$(NEWEST)/bin/python -m pytest -m "not long" $(PYTEST_ARGS)

$(NEWEST)/.installed: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]'
	@touch $@

faults: $(STAMP) ## all that can go wrong, with 50 kills at random moments; MOMENTS=100, SEED=7 (it prints one)
	FAULT_MOMENTS=$(MOMENTS) FAULT_SEED=$(SEED) $(BIN)/python -m pytest tests/faults -m "long or not long" -s $(PYTEST_ARGS)

lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP) ## mend style and format where that is mechanical
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP) ## build the documentation as a site, build/site; a dead link or name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(STAMP) ## run all benchmarks and write their pages, or only some: BENCH="name other_name"
	$(BIN)/python -m benchmarks $(or $(BENCH),--all) --write

venv-nemo: $(NEMO)/.installed ## an environment of its own for nemo-automodel, which pins other versions: a row of some benchmarks

# With triton 3.9, which it does not exclude, it does not import; of torch it takes any, and would take one with CUDA.
$(NEMO)/.installed: Makefile
	test -x $(NEMO)/bin/python || $(PYTHON) -m venv $(NEMO)
	$(NEMO)/bin/python -m pip install --quiet nemo-automodel==0.7.0 triton==3.7.1 $(shell grep '^torch==' constraints.txt)
	@touch $@

bench-smoke: $(STAMP) ## run every benchmark in its smallest form: none rots
	$(BIN)/python -m benchmarks --all --smoke
	$(BIN)/python -m benchmarks.gpu --smoke
	$(BIN)/python -m benchmarks.gpu.loss --smoke
	$(BIN)/python -m benchmarks.peers_exactness --smoke

bench-gpu: $(STAMP) ## the ladder of memory and speed on one CUDA device, and its page
	$(BIN)/python -m benchmarks.gpu --write

quickstart: $(STAMP) ## train a tiny model on two processes of this machine
	$(BIN)/python -m examples.quickstart

first-hour: $(STAMP) ## play a new user's first hour in a fresh clone; PARTS="readme mistakes" chooses some
	$(BIN)/python -m tests.first_hour $(PARTS)

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) .venv-torch-* $(LOWEST) $(NEMO) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
