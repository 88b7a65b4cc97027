# `make demo` and `make test` are all that a new user types; both set up .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
STAMP := $(VENV)/.installed
# Real token clouds ship with the package, so neither target needs the models extra.
EXTRAS := dev

.PHONY: demo test lint types floors unit bench docs format clean

demo: $(STAMP)
	$(BIN)/ot-transformers compare --out results/demo

test: lint types floors unit

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

floors: $(STAMP)
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

bench: $(STAMP)
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist docs/_build docs/gallery results

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "ot_transformers needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[docs]'
	touch $@
