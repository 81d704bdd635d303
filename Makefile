# Two commands set everything up on a machine with python3, make and a C compiler:
#   make demo    the rank ladder, in about two minutes
#   make test    lint and the default test tier
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := src tests benchmarks

.PHONY: env demo test test-all lint format bench clean help

help:
	@echo "make demo | test | test-all | lint | format | bench | env | clean"

env: $(STAMP)

# The stamp is written last, so an installation that broke off starts again.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/fullrank demo --out runs/demo

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

test: lint
	$(BIN)/pytest -n 2 -q

test-all: lint
	$(BIN)/pytest -n 2 -q -m 'not gpu'

bench: $(STAMP)
	$(BIN)/python -m benchmarks.output_layer --device cpu

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info
