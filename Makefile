# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs dist format clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

# torch comes first and pinned: a bare `torch` would bring gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sketchprop needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY) ## exact training, a smaller batch and kept tokens against the clock
	$(BIN)/python demo/kept_tokens.py

test: $(READY) lint ## lint, types, import order and all tests
	$(BIN)/python -m pytest

lint: $(READY) ## ruff, mypy, import order
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY) ## the documentation site, in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

dist: $(READY) ## wheel and sdist, in dist/; the wheel is built from the sdist
	rm -rf dist
	$(BIN)/python -m build --no-isolation

format: $(READY) ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache docs/_build
