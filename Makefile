# Every target sets up .venv first, from the pinned lock files.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet
FREEZE := freeze --exclude-editable --exclude pip --exclude setuptools
PACKAGES := --editable packages/caster --editable packages/caster-bench
FAST := tests/core tests/state tests/io tests/adapt tests/architecture/test_documents.py

unexport PYTHONDONTWRITEBYTECODE  # tests start many processes: compile the packages once

.PHONY: setup lint check test test-all demo bench docs package reproduction figures lock clean

setup: .venv/dev  ## everything the other targets need

check: lint  ## every edit: lint, types, imports and the fast tests
	$(BIN)/pytest -q -n 2 --dist worksteal -m "not slow" $(FAST)

test: lint  ## what CI runs: every test, large grids sampled
	$(BIN)/pytest -n 2 --dist worksteal

test-all: lint  ## every test on every case
	$(BIN)/pytest -n 2 --dist worksteal --whole

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

demo: .venv/dev  ## run the demo and write caster-demo.html
	$(BIN)/caster demo

reproduction: .venv/dev  ## rewrite reproduction/README.md and report, the leaderboard and marked figures, from the records
	$(BIN)/caster bench claims reproduction/claims.toml
	$(BIN)/caster bench leaderboard reproduction/sweeps/field.toml reproduction/sweeps/mixture.toml reproduction/sweeps/small.toml reproduction/sweeps/reproduction.toml --records reproduction/records -o docs
	$(BIN)/python docs/make_pages.py

docs: .venv/docs  ## build the site into build/site, and run its examples
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/site

package: build/packaging  ## build dist/ twice, compare, and try the wheels in a clean environment
	$</bin/python packages/check.py $(PYTHONS)

bench: .venv/dev  ## speed and memory, as ratios against peers in the same run
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/adapt.py

figures: .venv/dev  ## redraw the figures in docs
	$(BIN)/python -m docs.make_results
	$(BIN)/python -m docs.make_demo
	$(BIN)/python docs/make_corruptions.py
	$(BIN)/python docs/make_architecture.py
	$(BIN)/python -m docs.make_monitor
	$(BIN)/python docs/make_gallery.py
	npm install --no-save onnxruntime-web
	$(BIN)/python examples/browser/build.py build/browser
	$(BIN)/python -m docs.make_browser build/browser

.venv/base: requirements.lock $(wildcard packages/*/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "caster needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -r requirements.lock
	$(INSTALL) --no-deps --no-build-isolation $(PACKAGES)
	touch $@

.venv/dev: .venv/base requirements-dev.lock
	$(INSTALL) -r requirements-dev.lock
	touch $@

.venv/docs: .venv/dev requirements-docs.lock
	$(INSTALL) -r requirements-docs.lock
	touch $@

build/packaging: requirements-package.lock
	$(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	touch $@

lock:  ## rewrite the lock files with the newest versions that the packages allow
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --upgrade 'pip>=25.1'  # for --group
	$(PIP) install --quiet hatchling editables $(PACKAGES)
	(echo '# Both packages, for `make demo`. Written by `make lock`.'; $(PIP) $(FREEZE)) > requirements.lock
	$(PIP) install --quiet $(PACKAGES) --group dev
	(echo '# What the checks and tests add to requirements.lock. Written by `make lock`.'; \
	  $(PIP) $(FREEZE) | sed 's/+cpu$$//' | grep -vxFf requirements.lock) > requirements-dev.lock
	$(PIP) install --quiet --group docs
	(echo '# What the site adds to both, for `make docs`. Written by `make lock`.'; \
	  $(PIP) $(FREEZE) | sed 's/+cpu$$//' | grep -vxFf requirements.lock -f requirements-dev.lock) > requirements-docs.lock
	rm -rf build/packaging
	$(PYTHON) -m venv build/packaging
	build/packaging/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/packaging/bin/python -m pip install --quiet --group package
	(echo '# What `make package` builds and checks with. Written by `make lock`.'; \
	  build/packaging/bin/python -m pip $(FREEZE)) > requirements-package.lock

clean:
	rm -rf .venv
