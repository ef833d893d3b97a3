# make train   a virtual environment, a small model trained in about three minutes, and a sample of what it writes
# make test    the whole test suite
# make check   linter, format and types
# make test-interop   our layers against those of Hugging Face transformers, in an environment with torch, .venv-interop
# make aot     compiles everything for TPUs (v5e, v6e, v7x) and an H100, which need not be here, in .venv-tpu and .venv-cuda
#              (aot-v5e, aot-v6e, aot-tpu7x, aot-h100 for one)
# make benchmark   time and memory beside softmax attention and public peers, in .venv-benchmark, half an hour or so; figures and
#              plots in runs/benchmarks; ARGS="shapes" for a part: shapes, lengths, steps, writing, decays, forms
# make reproduce   published results beside ours, docs/results.md; an hour or so, some minutes with ARGS=--quick; plots in
#              runs/reproduce; reproduce-capacity for one
# Needs Python >= 3.11 and make. Another Python: make train PYTHON=/path/to/python
# A smaller torch, without CUDA: set PIP_EXTRA_INDEX_URL to the index of CPU builds that pytorch.org names
# Another model: make train CONFIG=configs/softmax.py; other options: make train ARGS="--config.steps=2000 --config.name=long"

VENV := .venv
BIN := $(VENV)/bin
# Their own dependencies are left out: they ask for other versions of jax, or for a GPU's packages.
PEERS := mamba2-jax==1.1.2 jax-linear-attention==0.1.0 mlstm_kernels==2.0.6 jax-triton triton
# The first of these that is new enough makes the environment.
PYTHONS := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
CONFIG ?= configs/small.py
ARGS ?=
TEST_ARGS ?= -n 2
RESULTS := seed_chapter performer_error capacity copy_task scaling pixels mqar

.PHONY: help train test test-interop aot aot-v5e aot-v6e aot-tpu7x aot-h100 benchmark reproduce $(RESULTS:%=reproduce-%) check lint format format-check types wheel-check clean

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

train: $(VENV)/lm.stamp
	$(BIN)/python scripts/train.py --config=$(CONFIG) $(ARGS)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(TEST_ARGS)

test-interop: .venv-interop/stamp
	.venv-interop/bin/python -m pytest tests_interop -rP -q

# Two at a time: they use one core each.
aot: .venv-tpu/stamp .venv-cuda/stamp
	@$(MAKE) --no-print-directory -j2 aot-v5e aot-h100 aot-v6e aot-tpu7x

aot-v5e aot-v6e aot-tpu7x: aot-%: .venv-tpu/stamp
	@.venv-tpu/bin/python scripts/aot/compile.py $*

aot-h100: .venv-cuda/stamp
	@.venv-cuda/bin/python scripts/aot/compile.py h100

benchmark: .venv-benchmark/stamp
	.venv-benchmark/bin/python scripts/benchmark.py $(ARGS)

reproduce: $(RESULTS:%=reproduce-%)

$(RESULTS:%=reproduce-%): reproduce-%: $(VENV)/dev.stamp
	$(BIN)/python scripts/reproduce/$*.py $(ARGS)

check: lint format-check types

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .

format-check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/pyright

wheel-check: $(VENV)/dev.stamp
	$(BIN)/python scripts/check_wheel.py

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .ruff_cache .hypothesis

# A stamp is as new as its last installation, so that a second call has nothing to do.
$(VENV)/lm.stamp: pyproject.toml | $(BIN)/python
	@echo "installing jax, flax, optax and what else the language model needs (a minute or two)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[lm]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	@echo "installing the project with all that its tests need (a minute or two)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/lm.stamp

# An environment of its own for each extra that the tests do without: interop, tpu, cuda, benchmark.
.venv-%/stamp: pyproject.toml | .venv-%/bin/python
	@echo "installing the project with its extra $* (some minutes)"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@for peer in $(if $(filter benchmark,$*),$(PEERS)); do \
	  $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$peer || echo "goes without $$peer"; \
	done
	@touch $@

# Some peers ask for Python 3.12; without it they are left out, and named.
.venv-benchmark/bin/python: PYTHONS := $(or $(PYTHON),python3.12 python3.13 python3.14 python3 python)

.PRECIOUS: .venv-%/stamp %/bin/python
%/bin/python:
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(@:/bin/python=) with $$($$python --version)"; \
	    $$python -m venv $(@:/bin/python=) && exit 0; \
	    rm -rf $(@:/bin/python=); \
	    echo "error: $$python could not make a virtual environment (see above; on Debian and Ubuntu: apt install python3-venv)" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "error: no Python >= 3.11 found (tried: $(PYTHONS)); install one, or name one with make PYTHON=/path/to/python" >&2; \
	exit 1
