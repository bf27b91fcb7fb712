# Set-up, demo, checks and tests; each does what set-up it lacks. `make` alone says what there is.
#
# Packages come from wherever pip is told to look (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf). Without a
# GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu avoids torch's gigabytes of CUDA.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPTS := examples/prompts.jsonl
ANSWERS := demo.answers.jsonl

# Installed once for each content of these files, wherever and whenever they were checked out.
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(KEY)
INSTALLED_DEV := $(VENV)/.installed-dev-$(KEY)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help demo test test-benches test-slow lint clean

help:
	@echo "make demo   answer $(PROMPTS) with a real model on three local nodes"
	@echo "make test   all checks and tests"
	@echo "make test-benches   every bench starts, at its smallest size"
	@echo "make test-slow   the tests that take longer than the default suite allows"
	@echo "make lint   the checks only: ruff, mypy, import-linter"
	@echo "make clean  remove the environment, caches and the demo's answers"

demo: $(INSTALLED)
	@echo "demo: answering $(PROMPTS) on local nodes (the first run also fetches the model, 92 MB)"
	@$(BIN)/bbquic generate $(PROMPTS) -o $(ANSWERS)
	@echo "demo: all answers are in $(ANSWERS); the first three:"
	@$(BIN)/python examples/show.py $(ANSWERS) 3

test: lint
	@echo "test: pytest"
	@$(BIN)/python -m pytest

test-benches: $(INSTALLED_DEV)
	@echo "test-benches: pytest -m starts"
	@$(BIN)/python -m pytest -m starts

test-slow: $(INSTALLED_DEV)
	@echo "test-slow: pytest -m slow"
	@$(BIN)/python -m pytest -m slow

lint: $(INSTALLED_DEV)
	@echo "lint: ruff check"
	@$(BIN)/ruff check
	@echo "lint: ruff format --check"
	@$(BIN)/ruff format --check
	@echo "lint: mypy"
	@$(BIN)/mypy
	@echo "lint: import-linter"
	@$(BIN)/lint-imports

clean:
	@echo "clean: removing $(VENV), caches, and $(ANSWERS) (the downloaded model stays in your cache)"
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@rm -rf src/*.egg-info $(ANSWERS)
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: $(PYTHON) is missing or older than Python 3.11" >&2; \
	    echo "hint: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "set-up: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "error: $(PYTHON) cannot make a virtual environment" >&2; \
	    echo "hint: on Debian and Ubuntu, sudo apt install python3-venv" >&2; exit 1; }

# torch goes first and alone, so that its pinned build is settled before anything asks for a newer one.
$(INSTALLED): | $(BIN)/python
	@echo "set-up: installing torch (minutes, the first time)"
	@$(PIP) torch
	@echo "set-up: installing bbquic"
	@$(PIP) -e .
	@touch $@

$(INSTALLED_DEV): | $(INSTALLED)
	@echo "set-up: installing the tools for checks and tests"
	@$(PIP) -e '.[dev,bench]'
	@touch $@
