# Every target installs what it needs: on a machine with only Python 3.11+ and make, `make demo` fills .venv and runs.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := $(wildcard requirements.lock)
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest
# A machine with a GPU has torch in an environment of its own, and no network to fill .venv.
HERE := $(or $(wildcard $(BIN)/python),$(PYTHON))
# Tests start hundreds of processes. Without bytecode on disk each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test long compat lint format clean help lock kernels sbom gpu gpu-wheels
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create the environment in .venv

demo: $(STAMP)  ## train a model from raw text while a node is killed (ARGS="--storage s3" uses an object store)
	$(BIN)/tidewheel demo $(ARGS)

test: $(STAMP)  ## run ruff, mypy and the tests: real Ray clusters, a real S3-protocol server, real kills
	$(BIN)/ruff check .
	$(PYTEST) -n 5 --dist loadfile --no-loadscope-reorder --durations=25 -m "not long" tests/unit tests/k8s tests/security tests/chaos tests/cluster

long: $(STAMP)  ## run the tests of a minute or more that `make test` leaves out, and property tests with new examples
	$(PYTEST) -m long tests
	HYPOTHESIS_PROFILE=explore $(PYTEST) -n 2 --dist loadfile tests/unit/data tests/unit/shards

compat: $(STAMP)  ## run the contract and elastic tests on each release of Ray that is known to work, in .compat
	$(BIN)/python -m tests.compat

gpu:  ## measure one GPU in ten minutes and print the table; at a tiny shape without a GPU (ARGS="--budget 300")
	PYTHONPATH=platform:. $(HERE) -m tests.benchmarks.gpu $(ARGS)

gpu-wheels:  ## download to .wheels what `make gpu` needs on a machine without network
	PYTHONPATH=platform:. $(HERE) -m tests.benchmarks.gpu.wheels $(ARGS)

lint: $(STAMP)  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

lock:  ## write requirements.lock with the hash of each package; `make install` then accepts no other
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m tests.security.dependencies lock

kernels: $(STAMP)  ## compile the text kernels that the package includes; needed after a change to one
	$(BIN)/python -m tidewheel.data.kernel_build

sbom: $(STAMP)  ## write sbom.json, a CycloneDX list of the installed packages
	$(BIN)/python -m tests.security.dependencies sbom

format: $(STAMP)  ## sort imports and fix what ruff can fix
	$(BIN)/ruff check --fix .

clean:  ## remove the environment, caches and the output of the demo
	rm -rf $(VENV) .compat .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output

$(STAMP): pyproject.toml constraints.txt $(LOCK)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; install it, or give its path: make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module; on Debian: apt-get install python3-venv"; exit 2; }
ifeq ($(LOCK),)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e ".[dev]"
else
	$(PYTHON) -m venv --clear $(VENV)  # pip does not compare installed packages with the lock
	$(PIP) install --require-hashes --no-deps -r $(LOCK)
	$(PIP) install --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip --disable-pip-version-check check || { echo "$(LOCK) does not fit pyproject.toml: make it again with 'make lock'"; exit 2; }
endif
	@touch $(STAMP)
