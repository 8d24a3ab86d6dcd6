# `make serve` and `make test` do everything on a fresh machine that has make and Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 1000
SECONDS ?= 60
STREAMS ?= 20000
# What a stamp depends on: unchanged packaging means nothing to install.
PACKAGING := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install serve test test-compose sim chaos soak coverage check gen lock sbom bench clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(VENV)/.installed  ## the environment with what serving needs, in .venv

serve: install  ## serve the default model; make serve ARGS="--port 50052 --frontends 2"
	@exec $(BIN)/stepwire serve $(ARGS)

test: $(VENV)/.installed-dev  ## every test; make test ARGS="tests/unit -k pool"
	$(BIN)/python -m pytest $(ARGS)

test-compose: $(VENV)/.installed-dev  ## the containers, on the Docker engine of this machine
	$(BIN)/python -m pytest tests/compose $(ARGS)

sim: $(VENV)/.installed-dev  ## worlds of the scheduler simulation; make sim SEEDS=100000 for the night
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

chaos: $(VENV)/.installed-dev  ## kills and stops under streams with known answers; make chaos SECONDS=60 SEED=1 ARGS=--standby
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(VENV)/.installed-dev  ## short and cancelled streams: nothing grows; make soak STREAMS=20000
	$(BIN)/python -m tests.chaos.soak --streams $(STREAMS) $(ARGS)

coverage: $(VENV)/.installed-dev  ## branch coverage of scheduler_svc/core; fails below 100 %
	$(BIN)/python -m tests.core_coverage

check: $(VENV)/.installed-dev  ## formatting, lint, types, generated code, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy protos scheduler_svc executor_svc kernels benchmarks
	$(BIN)/buf lint protos
	$(BIN)/python -m protos.generate --check
	$(BIN)/python -m protos.reference --check
	$(BIN)/python -m pytest tests/architecture

gen: $(VENV)/.installed-dev  ## regenerate the code beside the .proto files, and docs/api.md from their comments
	$(BIN)/python -m protos.generate
	$(BIN)/python -m protos.reference

lock: $(VENV)/.installed-dev  ## the hash-pinned lists that the images are built from
	UV=$(BIN)/uv deploy/locks/lock.sh

sbom: $(VENV)/.installed-dev  ## what is in the images: CycloneDX and licences, in dist/sbom
	$(BIN)/python deploy/sbom.py

bench: $(VENV)/.installed-dev  ## continuous batching against one by one and static batches
	$(BIN)/python -m benchmarks.batching $(ARGS)

clean:  ## remove the environment and every cache of the tools
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stepwire needs Python 3.11 or later: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(PACKAGING) | $(BIN)/python
	@echo "installing into $(VENV): minutes the first time, torch is large"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[scheduler,executor,bench,tracing]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[scheduler,executor,bench,tracing,dev]'
	@touch $@
