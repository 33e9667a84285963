# make demo    the whole tour          make test    every check
# Both set up all they need in .venv; a second call starts at once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CORE := .venv-core
CORE_READY := $(CORE)/.ready
PIP := -m pip --disable-pip-version-check -qq install -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

THINKING := $(wildcard tests/words tests/think tests/golden)
DOCS := tests/docs
RANKS := tests/ranks tests/parity

define NEW_VENV
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Shardsmith needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

.PHONY: help
help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(call NEW_VENV,.venv)
	@echo "1/2 installing torch into .venv: the first time some minutes, most of it download (about 1 GB)"
	@$(BIN)/python $(PIP) torch
	@echo "2/2 installing Shardsmith and the rest"
	@$(BIN)/python $(PIP) -e '.[train,dev]'
	@touch $@

$(CORE_READY): pyproject.toml constraints.txt
	$(call NEW_VENV,$(CORE))
	@echo "Installing the core of Shardsmith, without torch, into $(CORE)"
	@$(CORE)/bin/python $(PIP) .
	@touch $@

.PHONY: setup
setup: $(READY)  ## create .venv and install into it

.PHONY: demo
demo: $(READY)  ## real text, a plan on 8 local ranks, a parity certificate, a timeline
	@$(BIN)/shardsmith demo

.PHONY: test
test: lint types contracts core  ## every check
	$(PYTEST) -n 2 $(THINKING) $(DOCS)
	$(PYTEST) -n 2 --dist loadfile -m 'not alone' $(RANKS)
	$(PYTEST) -m alone $(RANKS)

.PHONY: fast
fast: $(READY)  ## the tests of the thinking wing, under a minute
	$(PYTEST) -n 2 $(THINKING)

.PHONY: ranks
ranks: $(READY)  ## the tests that start several processes: those that measure time one after the other
	$(PYTEST) -n 2 --dist loadfile -m 'not alone' $(RANKS)
	$(PYTEST) -m alone $(RANKS)

.PHONY: lint
lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(READY)  ## mypy, strict
	$(BIN)/mypy

.PHONY: contracts
contracts: $(READY)  ## import-linter: imports point downwards only
	$(BIN)/lint-imports --no-cache --no-logo

.PHONY: core
core: $(CORE_READY)  ## the core works where torch is not installed
	@$(CORE)/bin/python $(PIP) --no-deps --force-reinstall .
	@cd $(CORE) && bin/python ../tests/docs/core_without_torch.py

.PHONY: bench
bench: $(READY)  ## train the same model with others and compare; figures into docs/measured.md
	$(BIN)/python benchmarks/bench.py --json benchmarks/figures.json --write docs/measured.md
	$(BIN)/python benchmarks/tensor_share.py --write docs/measured.md

.PHONY: clean
clean:  ## remove everything that make made
	rm -rf .venv $(CORE) benchmarks/.envs build dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache
