# CI runs these targets (.ci/run). Each works on a fresh machine: it creates .venv first, and again
# whenever the requirements or a member's pyproject.toml change.

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# -qq: errors only, without warnings about packages that a shared index lacks.
PIP    := $(BIN)/python -m pip install -qq --progress-bar off --disable-pip-version-check
TORCH  := $(shell sed -n '/^torch==/p' requirements/constraints.txt)
BUILD  := $(shell sed -n '/^setuptools==/p' requirements/constraints.txt)
NEEDS  := $(wildcard requirements/*.txt pyproject.toml */pyproject.toml */*/pyproject.toml \
            platforms/cpu_kernels/setup.py platforms/cpu_kernels/include/* \
            platforms/cpu_kernels/src/native/*)
# Directories that ruff checks, if they exist.
CODE   := $(wildcard conftest.py core platforms attention_backends schedulers model_registry \
            plugins tests examples bench docs)

.DEFAULT_GOAL := help
.PHONY: help kernels demo chat lab test collect check docs sanitize features wheels dist bench gpu-check gpu-bundle soak clean

help:  ## print the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The kernels can be compiled with this package alone, before the other packages are installed.
$(VENV)/.setuptools: requirements/constraints.txt | $(BIN)/python
	$(PIP) $(BUILD)
	@touch $@

# torch first and alone, so that pip does not select another build of it for a dependency.
$(VENV)/.tools: requirements/constraints.txt requirements/tools.txt | $(VENV)/.setuptools
	$(PIP) $(TORCH)
	$(PIP) -r requirements/tools.txt -c requirements/constraints.txt
	@touch $@

# The tools first: members are built with them, not each in a separate environment. FlashInfer is
# last, because pip would report its missing dependencies.
$(STAMP): $(NEEDS) | $(VENV)/.setuptools
	@$(MAKE) --no-print-directory $(VENV)/.tools
	$(PIP) --no-build-isolation -r requirements/dev.txt -c requirements/constraints.txt
	$(PIP) --no-deps -r requirements/flashinfer.txt -c requirements/constraints.txt
	@touch $@

# pip uses one core. In CI, the other one compiles the kernels; then $(STAMP) only links them.
kernels: $(VENV)/.setuptools  ## compile the native kernels, without the other packages
	cd platforms/cpu_kernels && $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace

demo: $(STAMP)  ## create a small model and generate from it
	$(BIN)/dovetail demo

chat: $(STAMP)  ## download SmolLM2-135M (98 MB) on first use, and chat with it
	@$(BIN)/dovetail chat --model smollm2

lab: $(STAMP)  ## compare four scheduling policies in the simulator; ends with an HTML report
	$(BIN)/dovetail lab compare examples/lab_comparison.toml --out lab-results

test: $(STAMP)  ## run the tests, except slow tests and those for accelerators
	$(BIN)/python tests/features/suite.py

# `make test` starts four processes at the same time, and each would compile all test files.
collect: $(STAMP)  ## import every test file, which compiles it for later runs
	@$(BIN)/python -m pytest -q --collect-only | tail -n 1

soak: $(STAMP)  ## run every long test and 200,000 steps of random programs; resumes after an interruption
	PYTHONPATH=tests $(BIN)/python -m soak

features: $(STAMP)  ## check every claim of docs/features.md by its tests
	$(BIN)/python tests/features/prove.py

# CI sets ARCHITECTURE to select the costly tests, some of which `make test` would skip; `make test`
# runs the others.
check: $(STAMP)  ## format, lint, types, imports, architecture
	$(BIN)/ruff format --quiet --check $(CODE)
	$(BIN)/ruff check --quiet $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(ARCHITECTURE) tests/architecture

$(VENV)/.docs: $(STAMP) requirements/docs.txt
	$(PIP) -r requirements/docs.txt -c requirements/constraints.txt
	@touch $@

docs: $(VENV)/.docs  ## build the documentation site in site/, and check its links and resources
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python docs/site/check.py site
	@echo "open site/index.html, or serve it, which the search needs: $(BIN)/python -m http.server -d site"

sanitize: $(VENV)/.setuptools  ## run the native kernels under address and undefined-behavior sanitizers
	$(BIN)/python platforms/cpu_kernels/sanitize.py --sampled

wheels: $(STAMP)  ## run the contract suites on some of the wheels, each alone in an environment
	$(BIN)/python -m pytest -q --durations=10 --some-costly -m "slow and not soak" tests/wheels

dist: $(STAMP)  ## build a wheel of each member in dist/, for pip install --find-links dist 'dovetail[cpu]'
	$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist . \
	    $(sort $(dir $(wildcard */pyproject.toml */*/pyproject.toml)))
	$(BIN)/python platforms/cpu_kernels/manylinux.py dist

bench: $(STAMP)  ## measure the host cost of a step and offline throughput, and compare with other engines
	$(BIN)/python bench/step_overhead.py
	$(BIN)/python bench/offline.py
	$(BIN)/python bench/cpu_vs.py

# On a machine with a GPU and no network, run only this target: its Python provides torch, and the
# bundle provides the rest. In an installed checkout: make gpu-check GPU_PYTHON=$(BIN)/python
gpu-check:  ## test and measure everything on this machine's GPU, in ten minutes
	$(GPU_PYTHON) bench/gpu/check.py

gpu-bundle: $(STAMP)  ## collect in .gpu-bundle what gpu-check needs without a network
	$(BIN)/python bench/gpu/bundle.py

clean:  ## remove all outputs of the targets above, and .venv
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis \
	    .demo .bench .gpu-bundle build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
