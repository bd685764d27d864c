# Two commands do everything on a fresh machine: `make demo` and `make test`.
# `make test TORCH=2.x.y` tests with another release of torch, in an environment of its own.
PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VERSIONS := $(VENV)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test soak lint docs dist format clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

# torch comes first and pinned: a bare `torch` would bring gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt src/sketchprop/_version.py src/sketchprop/core/draw.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sketchprop needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt > $(VERSIONS)
	$(BIN)/python -m pip install --quiet --constraint $(VERSIONS) torch
	$(BIN)/python -m pip install --quiet --constraint $(VERSIONS) --editable '.[dev]'
	touch $@

demo: $(READY) ## exact training, a smaller batch and kept tokens against the clock
	$(BIN)/python demo/kept_tokens.py

# Types are checked against one release of torch: its annotations differ from the next one's.
test: $(READY) $(if $(TORCH),,lint) ## lint, types, import order and all tests; TORCH=2.x.y: with that release
	$(BIN)/python -m pytest

MINUTES ?= 10
SEED ?=
soak: $(READY) ## random cases for MINUTES=10; SEED=7 repeats a run
	$(BIN)/python tests/fuzz/fuzz_run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

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
