# Lagrange: `make run` sets everything up and trains; `make test` sets everything up and passes the tests.
# A second call installs nothing: each environment holds a stamp that is newer than its requirement files.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
CONFIG ?= configs/local.yaml
# Where pip finds PyTorch's CPU build, if the default index serves the larger CUDA build: make run PIP_TORCH="--index-url ..."
PIP_TORCH ?=
PIP := -m pip install --quiet --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

# Says every half minute how large the environment $(1) has become; ends with the recipe's shell, however that ends.
SIGNS_OF_LIFE = began=$$SECONDS; (while sleep 30 > /dev/null 2>&1 && kill -0 $$$$ 2> /dev/null; do \
	echo "  $(1): $$(du -sh $(1) 2> /dev/null | cut -f1) after $$((SECONDS - began)) s"; done) & trap "kill $$! 2> /dev/null" EXIT

VENV := .venv/.ready
ENGINE := .venv-sglang/.ready
BIN := .venv/bin

.PHONY: help setup run test test-fast test-docker test-kubernetes lint format clean python

help:
	@echo 'make run        set up and train configs/local.yaml (CONFIG=... for another, SET="--set lag.max=4")'
	@echo 'make test       set up, lint, type check and run all tests (about 25 minutes)'
	@echo 'make test-fast  the tests that need neither SGLang nor Megatron-core (at most 2 minutes)'
	@echo 'make test-docker the tiny system in a real Docker engine: kill, scale, resume (root, about half an hour)'
	@echo 'make test-kubernetes the manifests on a real control plane, which it builds once (fifteen minutes, then three)'
	@echo 'make soak       the long variants: thousands of schedules, hundreds of kills'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     let ruff mend what it can'
	@echo 'make setup      the two environments alone'
	@echo 'make clean      remove environments and caches; runs/ stays'

setup: $(VENV) $(ENGINE)

run: setup
	@$(BIN)/lagrange up $(CONFIG) $(SET)

test: setup lint
	@$(BIN)/python -m pytest -q -m 'not soak'

test-fast: $(VENV)
	@$(BIN)/python -m pytest -q -m 'not engine and not megatron and not slow and not soak'

test-docker: $(VENV)
	@$(BIN)/python -m pytest tests/deploy/docker/drills.py tests/deploy/docker/override_drills.py -q -s

test-kubernetes: $(VENV)
	@KUBERNETES_BUILD=1 $(BIN)/python -m pytest tests/deploy/kubernetes_api/drills.py -q -s

soak: setup
	@$(BIN)/python -m pytest -q -m soak

lint: $(VENV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-sglang .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

python:
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) is missing. Install Python 3.11 (Debian 12: apt-get install python3.11 python3.11-venv), or name it: make run PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo '$(PYTHON) is not Python 3.11, for which the versions in requirements/ are pinned. Name one: make run PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments. Debian 12: apt-get install python3.11-venv' >&2; exit 1; }

# PyTorch goes first and alone: Megatron-core's metadata asks for Python 3.12 although its wheel for 3.11 works, and the
# flag that overrides this must not reach the choice of any other package.
$(VENV): requirements/base.txt requirements/trainer.txt requirements/tasks.txt requirements/traces.txt requirements/dev.txt pyproject.toml | python
	@echo 'Setting up .venv: Lagrange, PyTorch and Megatron-core (1.9 GB: two to three minutes on a fast link and idle cores)'
	@$(call SIGNS_OF_LIFE,.venv); rm -rf .venv && $(PYTHON) -m venv .venv && \
	$(BIN)/python $(PIP) $(PIP_TORCH) torch==2.13.0 && \
	$(BIN)/python $(PIP) --no-deps -r requirements/base.txt -r requirements/trainer.txt -r requirements/tasks.txt -r requirements/traces.txt -r requirements/dev.txt && \
	$(BIN)/python $(PIP) --no-deps --ignore-requires-python megatron-core==0.19.2 && \
	$(BIN)/python $(PIP) --no-deps --no-build-isolation --editable . && \
	echo ".venv is ready ($$((SECONDS - began)) s)" && touch $@

# SGLang pins a CUDA build of PyTorch, so its dependencies are named by us and it is installed without them.
$(ENGINE): requirements/sglang.txt $(wildcard rollout/sglang_cpu_plugin/pyproject.toml rollout/sglang_cpu_plugin/*/*.py) | python
	@echo 'Setting up .venv-sglang: the SGLang engine and its CPU plugin (2.8 GB: three to four minutes)'
	@$(call SIGNS_OF_LIFE,.venv-sglang); rm -rf .venv-sglang && $(PYTHON) -m venv .venv-sglang && \
	.venv-sglang/bin/python $(PIP) $(PIP_TORCH) torch==2.13.0 && \
	.venv-sglang/bin/python $(PIP) --no-deps -r requirements/sglang.txt && \
	.venv-sglang/bin/python $(PIP) --no-deps torchvision==0.28.0 sglang==0.5.23 && \
	.venv-sglang/bin/python $(PIP) --no-deps --no-build-isolation ./rollout/sglang_cpu_plugin && \
	echo ".venv-sglang is ready ($$((SECONDS - began)) s)" && touch $@
