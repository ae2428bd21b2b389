# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index. `make help` lists the rest.
#
#   make test                        makes .venv, installs pinned versions into it, runs every check
#   make test PYTHON=/path/python    uses that interpreter as it is: no environment is made, nothing is installed
#   make demo VENV=/path/venv        keeps the environment there instead of in .venv

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit interpret gpu-test chaos wheel clean install

VENV ?= .venv
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(GPU),constraints-cuda.txt,constraints-cpu.txt)

ifdef PYTHON
PY := $(PYTHON)
READY :=
else
BASE_PYTHON ?= python3
PY := $(VENV)/bin/python
READY := $(VENV)/.installed-$(CONSTRAINTS)
endif

# Two worker processes with one thread each: torch would otherwise start a thread per core in every worker.
export OMP_NUM_THREADS ?= 1
WORKERS ?= 2
PYTEST := $(PY) -m pytest -q -n $(WORKERS) --dist worksteal
CPU_ONLY := not gpu and not multi_gpu and not chaos

help:
	@echo "make demo      set up, then answer the demo prompts with the demo model"
	@echo "make test      set up, then lint, types and every test this machine can run"
	@echo "make lint      ruff check and ruff format --check"
	@echo "make types     pyright"
	@echo "make unit      the tests that need neither a GPU nor Triton's interpreter"
	@echo "make interpret the kernels in Triton's interpreter"
	@echo "make gpu-test  the tests that need an NVIDIA GPU"
	@echo "make chaos     jobs that are killed, torn and refused space at random; minutes"
	@echo "make wheel     build the wheel into dist/"
	@echo "make clean     remove build products and the environment"
	@echo "PYTHON=...     use this prepared interpreter and install nothing;  VENV=...  where to make the environment"

$(VENV)/.installed-$(CONSTRAINTS): pyproject.toml $(CONSTRAINTS)
	$(BASE_PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, $(BASE_PYTHON) is {sys.version.split()[0]}; give another as BASE_PYTHON=...")'
	test -x $(VENV)/bin/python || $(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) setuptools
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c $(CONSTRAINTS) -e '.[test]'
	touch $@

install: $(READY)

demo: $(READY)
	$(PY) -m launch.generate

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m pyright --pythonpath "$$($(PY) -c 'import sys; print(sys.executable)')"

unit: $(READY)
	$(PYTEST) -m "$(CPU_ONLY) and not interpret"

# A process either interprets Triton or compiles it, so the interpreted kernels have a run of their own.
interpret: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) -m "interpret and $(CPU_ONLY)" tests/test_kernels

# One process: tests of large tensors would not fit the card beside each other.
gpu-test: $(READY)
	$(PY) -m pytest -q -m "gpu and not multi_gpu and not chaos"

# What is killed here is started again many times; the tests of `make test` do the same a few times.
chaos: $(READY)
	$(PY) -m pytest -q -m "chaos and not gpu and not multi_gpu"

test: lint types unit $(if $(GPU),gpu-test) interpret

wheel: $(READY)
	$(PY) -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -rf .venv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
