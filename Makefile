# Two commands: `make demo` and `make test`. Both set up .venv first, from the pinned lock files.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
FREEZE := freeze --exclude-editable --exclude pip --exclude setuptools

.PHONY: demo test bench picture reproduction lock clean

demo: .venv/base  ## run the demo and write caster-demo.html
	$(BIN)/caster demo

test: .venv/dev  ## lint, types, layers, all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2

bench: .venv/dev  ## speed and memory, as ratios against peers in the same run
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/adapt.py

reproduction: .venv/dev  ## write REPRODUCTION.md and docs/reproduction anew, from the packed records
	$(BIN)/caster bench claims experiments/claims.toml

picture: .venv/dev  ## redraw docs/demo.png, the README's picture, and docs/corruptions.png
	$(BIN)/python docs/make_picture.py
	$(BIN)/python docs/make_corruptions.py

.venv/base: requirements.lock $(wildcard packages/*/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "caster needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet -r requirements.lock
	$(PIP) install --quiet --no-deps --no-build-isolation --editable packages/caster --editable packages/caster-bench
	touch $@

.venv/dev: .venv/base requirements-dev.lock
	$(PIP) install --quiet -r requirements-dev.lock
	touch $@

lock:  ## write both lock files anew, with the newest versions pyproject.toml allows
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet hatchling editables --editable '.[parquet,report]'
	(echo '# What `make demo` runs on. Written by `make lock`.'; $(PIP) $(FREEZE)) > requirements.lock
	$(PIP) install --quiet --editable '.[dev]'
	(echo '# What `make test` adds to requirements.lock. Written by `make lock`.'; \
	  $(PIP) $(FREEZE) | sed 's/+cpu$$//' | grep -vxFf requirements.lock) > requirements-dev.lock

clean:
	rm -rf .venv
