# What people and CI run. `make` alone says what there is.
#
# Everything happens in .venv, which is made on first use with Python 3.11 or newer and remade
# when pyproject.toml or constraints.txt changes. `make VENV=path …` uses another place.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMP := $(VENV)/.made-for-wllm-ray
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# torch's CPU build has a name of its own. Plain `torch` on Linux is the CUDA build, of several GB,
# which the CPU build of vLLM then refuses.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Object stores that the tests run and that exist only for Node.
SERVERS := tests/servers/node_modules/.made-for-wllm-ray

.PHONY: help setup servers demo test test-slow bench check format clean

help:
	@echo "make demo       a real model, a captured dataset, a probe and its picture, on a CPU"
	@echo "make test       the tests (no GPU, no network)"
	@echo "make check      lint, format, types, import contracts"
	@echo "make setup      only the environment, in $(VENV)"
	@echo "make servers    object stores for the tests, where npm is"
	@echo "make test-slow  the long sweeps as well"
	@echo "make bench      the benchmark: .bench/bench.json and .bench/bench.md"
	@echo "make format     let ruff rewrite what it can"
	@echo "make clean      remove caches (not $(VENV), not .demo)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none of python3.11 … python3 is."; exit 1; }
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet '$(TORCH)' 2>/dev/null \
		|| $(PIP) install '$(TORCH)' --index-url $(TORCH_INDEX)
	$(PIP) install --progress-bar off --constraint constraints.txt -e '.[cpu,serve,transformers,demo,probe,export,dev]'
	@# Beside the CPU torch, PyPI's builds of these fail at import and take transformers with them.
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP)
	$(BIN)/python -m deployments.demo

servers: $(SERVERS)

# Without them their tests are skipped; where CI says that it is CI, a failed install is an error.
$(SERVERS): tests/servers/package.json
	@if ! command -v npm >/dev/null; then \
		echo "npm is not here: the tests that need azurite or s3rver will be skipped"; \
	elif (cd tests/servers && npm install --no-audit --no-fund --no-package-lock \
			--fetch-retries=1 --loglevel=error); then \
		touch $@; \
	else \
		echo "npm could not install azurite and s3rver: the tests that need them will be skipped"; \
		test "$(CI)" != true; \
	fi

test: $(STAMP) servers
	$(BIN)/python -m pytest

test-slow: $(STAMP) servers
	$(BIN)/python -m pytest -m "slow or not slow"

bench: $(STAMP)
	$(BIN)/python -m tests.bench --out .bench

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find wllm_ray deployments tests -name __pycache__ -type d -prune -exec rm -rf {} +
