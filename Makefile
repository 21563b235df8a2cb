# The words that README and CI use. Everything is set up in .venv on first use.
PYTHON ?= python3
VENV ?= .venv
# A CPU build where the index has one; any torch >= 2.11 will do.
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.*
# Processes that run tests, a file at a time.
WORKERS ?= 2
# They ask for torch, which is there; what else they need is in the extra "test".
FRAMEWORKS ?= "accelerate>=1.1" "lightning>=2.4" "pytorch-lightning>=2.4" "torchmetrics>=1.5"
BIN := $(VENV)/bin
# The Python that has torch with CUDA, and pytest: without .venv the one of the shell.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

C_WARNINGS := -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wmissing-prototypes \
	-Wstrict-prototypes -Wcast-qual -Wpointer-arith -Wundef -Wvla -Werror
C_FLAGS := -std=c11 -g -O1 -D_GNU_SOURCE -DROTOR_TESTING -DROTOR_CHECKS -Icsrc/rotor -Itests/c $(C_WARNINGS) \
	-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
C_SOURCES := $(wildcard csrc/rotor/*.c)
C_HEADERS := $(wildcard csrc/rotor/*.h csrc/python/*.h tests/c/*.h)
C_OBJECTS := $(C_SOURCES:csrc/rotor/%.c=build/c/%.o)
C_TESTS := $(patsubst tests/c/%.c,build/c/%,$(wildcard tests/c/test_*.c))

# The C++ library after the sanitizer: it has to see the first exception that PyTorch throws.
SANITIZERS = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libstdc++.so)

.SECONDARY: $(C_OBJECTS)
.PHONY: help demo test test-all test-c test-sanitized lint docs docs-fast notebooks bench docs-tables gpu regressions clean
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip "setuptools>=77" wheel

$(VENV)/.torch: | $(VENV)/bin/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)"
	touch $@

$(VENV)/.built: $(VENV)/.torch setup.py pyproject.toml $(wildcard csrc/*/*.c) $(C_HEADERS)
	$(PIP) --no-build-isolation --editable ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.built
	$(PIP) --no-build-isolation --editable ".[test]"
	$(PIP) --no-deps "$(TORCHVISION)" $(FRAMEWORKS)
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --no-build-isolation --editable ".[dev]"
	touch $@

demo: $(VENV)/.built ## a ResNet-18 in 60 % of its memory: a table, the curve, a page
	$(BIN)/python benchmarks/demo.py

test: ## C tests under sanitizers, then the Python tests
	$(MAKE) -j$(WORKERS) $(VENV)/.test test-c
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-all: ## with the long checks, which have no time limit
	$(MAKE) -j$(WORKERS) $(VENV)/.test test-c
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -o faulthandler_timeout=0

build/c/%.o: csrc/rotor/%.c $(C_HEADERS)
	@mkdir -p build/c
	$(CC) $(C_FLAGS) -c $< -o $@

build/c/test_%: tests/c/test_%.c $(C_OBJECTS) $(C_HEADERS)
	$(CC) $(C_FLAGS) $< $(C_OBJECTS) -o $@ -ldl -lm -pthread

test-c: $(C_TESTS) ## the C core's tests, under the address and undefined-behaviour sanitizers
	@for t in $(C_TESTS); do echo "== $$t"; $$t || exit 1; done

test-sanitized: $(VENV)/.test ## the Python tests (TESTS=) on a sanitised build of the extension
	mkdir -p build/sanitized
	cp -r rotor build/sanitized/ && rm -f build/sanitized/rotor/_core*.so
	ln -sfn $(CURDIR)/models build/sanitized/rotor/models
	ROTOR_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-temp build/sanitized/temp \
		--build-lib build/sanitized
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(SANITIZERS)" PYTHONPATH=build/sanitized \
		$(BIN)/python -m pytest -m "not slow" -p no:cacheprovider $(TESTS)

lint: $(VENV)/.dev ## ruff, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev ## the documentation, warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

docs-fast: $(VENV)/.dev ## the same without executing the notebooks
	$(BIN)/python -m sphinx -W --keep-going -b html -D tutorials_execute=0 docs docs/_build/fast

notebooks: $(VENV)/.test ## the tutorials executed, as notebooks with their output
	$(BIN)/python tutorials/make_notebooks.py

bench: $(VENV)/.dev ## every benchmark; a page and a JSON file in benchmarks/results (BENCH=--quick)
	$(BIN)/python benchmarks/run_all.py $(BENCH)

docs-tables: $(VENV)/.test ## the tables of docs and README, from benchmarks/results
	$(BIN)/python benchmarks/docs_tables.py

gpu: ## tests and benchmarks on one device, in at most 25 minutes, written as by bench; nothing is installed
	$(GPU_PYTHON) setup.py -q build_ext --inplace
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/run_all.py --gpu

regressions: $(VENV)/.test ## counts of solvers, planner and simulator, and plans, beside the committed ones
	$(BIN)/python benchmarks/regressions.py
	$(BIN)/python benchmarks/golden.py

clean: ## what was built, not .venv
	rm -rf build dist docs/_build *.egg-info rotor/_core*.so
