# make train   train a router from random weights in about three minutes, beside the heuristics
# make test    run the quick tests on the installed package, some minutes
# make test-all run the long ones as well
# make coverage the same, and 90 % of the Python lines must have run
# make test-nojit, test-boundscheck   the engines without numba, and with its check of every index
# make test-processors   golden and checkpoint tests with the arithmetic of other processors
# make test-mutants   the engines with errors in them, each of which a quick test must notice
# make test-interop   Ray, RLlib, TorchRL, skrl, Tianshou, d3rlpy and Minari, in an environment of their own
# make lint    ruff and pyright
# make bench   speed of the environments beside references
# make docs    the documentation as a web site, in site/
# make install, constraints, clean   the environment alone; the pinned versions anew; what was built
#
# PYTHON=python3.12     interpreter of a new virtual environment (3.11 to 3.13)
# VENV=.venv            where that environment lives
# INSTALL=dist/x.whl    what to install and check: this tree by default, or a built wheel
# ARGS="..."            further arguments of the command behind the target

PYTHON ?= python3
VENV ?= .venv
INSTALL ?= .
WORKERS ?= 2
PINS ?= --constraint constraints.txt
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ROOT := $(CURDIR)
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := agents,plots,sweep,docs,test,dev,track
TRAIN_EXTRAS := agents,plots

# One thread a process: two torch threads on two busy cores are many times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: help train test test-all coverage test-nojit test-boundscheck test-processors test-mutants test-interop lint ruff pyright bench docs install constraints clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# torch comes first and alone: the pinned version may be a CPU build that lies on this machine,
# and a resolver that has not seen it installed prefers the latest build with CUDA libraries.
$(BIN)/.torch: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "Python 3.11, 3.12 or 3.13 is needed; $(PYTHON) is %d.%d (set PYTHON=)" % v)'
	@echo "Installing torch in $(VENV): some minutes, once, by the network ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PINS) setuptools torch==2.13.0
	touch $@

# Everything for development, or, for `make train`, what training needs and no more.
$(BIN)/.installed: EXTRA = $(EXTRAS)
$(BIN)/.trainable: EXTRA = $(TRAIN_EXTRAS)
$(BIN)/.installed $(BIN)/.trainable: $(BIN)/.torch
	@echo "Installing servegym with the extras $(EXTRA): some minutes, once, by the network ..."
	rm -rf build
	$(PIP) install --quiet $(PINS) torch==2.13.0 "$(INSTALL)[$(EXTRA)]"
	touch $@

# The package itself is installed anew every time, so that the checks never see an older tree.
REINSTALL = echo "Installing servegym anew: seconds ..." && rm -rf build && $(PIP) install --quiet --no-deps --no-build-isolation --force-reinstall "$(INSTALL)"

install: $(BIN)/.installed
	@$(REINSTALL)

train: $(BIN)/.trainable
	@$(REINSTALL)
	$(BIN)/python -m servegym.experiments.train_and_compare $(ARGS)

# Run from an empty folder: what is tested is the installed package and nothing of the tree but tests/.
# A worker goes through its half in order, so that modules make what their tests share once.
TESTS ?= tests
PYTEST = away=$$(mktemp -d) && trap 'rm -rf "$$away"' EXIT && cd "$$away" && \
	$(BIN)/pytest -c $(ROOT)/setup.cfg --rootdir=$(ROOT) -n $(WORKERS) --dist worksteal

# The engines are compiled once, before the workers start.
WARM = echo "Compiling the engines: about four minutes, once a machine; later seconds ..." && $(BIN)/servegym warm
test: install
	@$(WARM)
	@echo "Running the quick tests on $(WORKERS) processes: about five minutes ..."
	@$(PYTEST) -m "not slow" $(ARGS) $(addprefix $(ROOT)/,$(TESTS))

test-all: install
	@$(WARM)
	@$(PYTEST) $(ARGS) $(addprefix $(ROOT)/,$(TESTS))

coverage:
	@export COVERAGE_FILE=$${COVERAGE_FILE:-$(ROOT)/.coverage} && \
	$(MAKE) --no-print-directory test-all ARGS="--cov --cov-config=$(ROOT)/setup.cfg $(ARGS)"

# The engines step by step in Python: hours for all tests, minutes for these. What plays episodes of
# the placement simulator is skipped, but for the tests of its clusters.
test-nojit: TESTS = tests/robustness/test_argument_properties.py \
  tests/envs/llm_routing/test_reference_known_answers.py \
  tests/envs/serverless_moe/test_outcomes.py \
  tests/envs/serverless_moe/test_kernel_reference.py tests/envs/expert_placement/test_cluster.py
test-nojit: install
	@export NUMBA_DISABLE_JIT=1 && $(PYTEST) -m "not slow" $(ARGS) $(addprefix $(ROOT)/,$(TESTS))

# Compiled anew in a folder of its own, with an error for an index that is out of bounds.
test-boundscheck: TESTS = tests/envs tests/robustness tests/baselines
test-boundscheck: install
	@export NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$$(mktemp -d) && \
	$(PYTEST) $(ARGS) $(addprefix $(ROOT)/,$(TESTS))

test-processors: install
	@$(BIN)/servegym warm && \
	$(BIN)/python tests/processors.py -n $(WORKERS) --dist worksteal $(ARGS)

# Each in a copy of the tree, with the one test that is named with it in the list.
test-mutants: $(BIN)/.installed
	$(BIN)/python tests/mutants.py $(ARGS)

# Libraries that the suite itself does without, without its pins, since Ray wants an older Gymnasium;
# one process, because Ray takes both cores.
test-interop:
	@$(MAKE) --no-print-directory test-all VENV=$(VENV)-interop WORKERS=0 PINS= \
	  TESTS=tests/interop \
	  EXTRAS=agents,plots,sweep,track,test,real,interop,ray ARGS="$(ARGS)"

lint: ruff pyright

ruff: $(BIN)/.installed
	$(BIN)/ruff check $(ROOT)
	$(BIN)/ruff format --check $(ROOT)

# From an empty folder: below its project's root pyright looks into no folder whose name begins with a
# dot, as that of the environment does.
pyright: install
	away=$$(mktemp -d) && trap 'rm -rf "$$away"' EXIT && cp pyproject.toml "$$away" && cd "$$away" && \
	$(BIN)/pyright --pythonpath $(BIN)/python \
	  "$$(cd / && $(BIN)/python -c 'import importlib.util as u; print(*u.find_spec("servegym").submodule_search_locations)')"

bench: install
	$(BIN)/servegym bench $(ARGS)

# Strict: a warning or a dead link fails. The two variables silence advertisements of the tools.
docs: install
	@echo "Building the documentation in site/: one or two minutes ..."
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet $(ARGS)

constraints:
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PYTHON) -m venv $$fresh && \
	$$fresh/bin/pip install --quiet torch==2.13.0 && \
	$$fresh/bin/pip install --quiet --upgrade setuptools ".[$(EXTRAS)]" && \
	{ echo "# The exact versions the checks pass with (make constraints writes this file)."; \
	  $$fresh/bin/pip freeze --all --exclude pip --exclude serve-gym | sed 's/+cpu$$//'; } > constraints.txt.tmp && \
	mv constraints.txt.tmp constraints.txt

clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
