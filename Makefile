# Every target sets up what it needs. ARGS goes to the command: make demo ARGS="--rounds 3 --sites 6"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.fedveil-ready
TESTED := $(VENV)/.fedveil-tests
BENCH := $(VENV)/.fedveil-bench
# Nothing is resolved: what is installed stands in lock/*.txt with its hash, whatever an index says.
LOCKED := -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --no-build-isolation
# 1.41 or 1.42: Flower's releases whose SuperNodes speak HTTP; docs/deploy/provision.md says which to take. Each has a VENV of its own.
FLOWER ?=
HTTP_VENV ?= .venv-http$(if $(FLOWER),-$(FLOWER))
# The Python and the environment of `make newest`, which reads no lock.
NEWEST_PYTHON ?= python3.12
NEWEST_VENV ?= .venv-newest
# Everything but what takes minutes or needs more than a CPU.
EVERY := -m "not slow and not gpu and not containers and not browser"
# Bytecode is kept, whatever the environment asks: to rewrite the asserts of all tests anew takes each worker 15 s of CPU.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What differs by Flower: guard, apps, console, and a federation on this machine.
HTTP_TESTS := tests/fedveil/guard tests/fedveil/relay tests/client_app/test_app.py tests/client_app/state/test_replay_guard.py \
  $(addprefix tests/server_app/test_,flower_strategy.py message_signing.py object_reader.py quorum.py reception.py resume.py hostile_replies.py) tests/fedveil/console/launch tests/fedveil/console/flower \
  tests/fedveil/console/commands/test_doctor.py tests/fedveil/console/commands/test_demo.py tests/fedveil/console/provisioning tests/deployment/test_loopback.py tests/deployment/test_restarts.py
# An index with torch's build for the CPU; nothing else is asked of it. Where pip finds no such build: PyPI's, which is for CUDA.
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test long http newest coverage containers check mutate build sbom docs lock release bench bench-test gpu methods clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(READY) ## Create .venv and install FedVeil in it, with pinned versions

# Anew after each change of pyproject.toml, whose entry points only an installation shows.
$(READY): pyproject.toml $(wildcard lock/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { \
	  echo "error: PYTHON: expected Python 3.11 or 3.12, found $$($(PYTHON) --version 2>&1); run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@echo "Installing into $(VENV) (once; some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(LOCKED) -r lock/tools.txt
	@$(BIN)/python $(LOCKED) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r lock/cpu.txt 2>/dev/null || \
	  $(BIN)/python $(LOCKED) -r lock/cuda.txt
	@$(BIN)/python $(LOCKED) -r lock/run.txt
	@$(if $(FLOWER),$(BIN)/python $(LOCKED) -r lock/flower-$(FLOWER).txt)
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip check
	@touch $@

# What checks and tests need besides; the demo and a user's run do without.
$(TESTED): $(READY)
	@echo "Installing what the tests need (once; a minute)"
	@$(BIN)/python $(LOCKED) -r lock/test.txt
	@$(BIN)/python -m pip check
	@touch $@

demo: $(READY) ## Run the demo: four ways to send over gRPC, each attacked, with a report (ARGS="--rounds 3")
	@$(BIN)/fedveil demo $(ARGS)

test: $(TESTED) ## Run the fast tests, two at a time (ARGS="-k fedrand", WORKERS=8)
	@$(PYTEST) $(ARGS)

long: $(TESTED) ## Run what make test leaves out because it takes seconds of CPU or starts processes
	@$(PYTEST) -m long $(ARGS)

http: ## Set up .venv-http with Flower 1.41 (FLOWER=1.42), and run there what differs by Flower, a federation over HTTP among it
	@$(MAKE) --no-print-directory test VENV=$(HTTP_VENV) FLOWER=$(or $(FLOWER),1.41) ARGS='$(EVERY) $(HTTP_TESTS) $(ARGS)'

# A new environment each time, whose versions the index decides: to see what will break. No target that users run does this.
newest: BIN := $(NEWEST_VENV)/bin
newest: ## Set up .venv-newest with the newest releases that pyproject.toml allows, and run the fast tests and the demo there
	@$(NEWEST_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { \
	  echo "error: NEWEST_PYTHON: expected Python 3.12, found $$($(NEWEST_PYTHON) --version 2>&1); run: make newest NEWEST_PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "Installing the newest releases into $(NEWEST_VENV) (some minutes)"
	@$(NEWEST_PYTHON) -m venv --clear $(NEWEST_VENV)
	@env -u PIP_CONSTRAINT $(BIN)/python -m pip install --quiet --upgrade pip setuptools
	@$(if $(TORCH_INDEX),env -u PIP_CONSTRAINT $(BIN)/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) torch)
	@env -u PIP_CONSTRAINT $(BIN)/python -m pip install --quiet -e '.[test]'
	@$(BIN)/python -m pip check
	@$(BIN)/python -m pip list
	@$(PYTEST) $(ARGS)
	@$(BIN)/fedveil demo

coverage: $(TESTED) $(BENCH) ## Run fast and long tests, those of the benchmarks too, and measure coverage; fails below fail_under of pyproject.toml
	@$(PYTEST) tests benchmarks/tests $(EVERY) --cov --cov-report=term --cov-report=xml $(ARGS)

containers: $(TESTED) ## Build the image and run the tests that need a container engine (FLOWER=1.41)
	@$(if $(FLOWER),FEDVEIL_FLOWER=$(FLOWER)) $(BIN)/python -m pytest -q -m containers tests/deployment $(ARGS)

check: $(TESTED) ## Run ruff, mypy, the import rules, and pyright for imports that no editor would find
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=.:benchmarks $(BIN)/lint-imports --cache-dir .import_linter_cache
	@test $(VENV)/check/.fedveil-ready -nt lock/check.txt || { $(PYTHON) -m venv $(VENV)/check && \
	  $(VENV)/check/bin/python $(LOCKED) -r lock/check.txt && touch $(VENV)/check/.fedveil-ready; }
	@$(BIN)/python tools/measure_names.py
	@$(BIN)/python tools/count_markers.py
	@$(BIN)/python tools/find_imports.py $(VENV)/check/bin/basedpyright --pythonpath $(BIN)/python

mutate: $(TESTED) ## Break a package and see which breaks no test notices: make mutate PACKAGE=ops ARGS="--sample 40"
	@test -n "$(PACKAGE)" || { echo "error: PACKAGE: expected strategies, ops, wire, privacy, guard, client_app, server_app or secagg; run: make mutate PACKAGE=ops" >&2; exit 1; }
	@$(BIN)/python tools/mutate.py $(PACKAGE) --workers $(WORKERS) $(ARGS)

build: $(READY) ## Build the wheel and the source archive into dist/
	@rm -rf build dist
	@PYTHONWARNINGS=ignore $(BIN)/python -m build --no-isolation -C--quiet --outdir dist

sbom: build ## List the wheel's components beside it in dist/: CycloneDX 1.6, with licences and hashes
	@$(PYTHON) -m venv $(VENV)/sbom
	@$(VENV)/sbom/bin/python $(LOCKED) -r lock/sbom.txt
	@$(VENV)/sbom/bin/python tools/sbom.py --python $(BIN)/python --without test tools sbom docs check --wheel dist/*.whl --out dist/fedveil.cdx.json

# From the files of the tag alone; docs/release.md.
release: $(READY) ## Build a release from a tag into dist/release/: make release TAG=v0.2.0 KEY=~/.ssh/release
	@test -n "$(TAG)" -a -n "$(KEY)" || { \
	  echo "error: TAG, KEY: expected a tag and an Ed25519 key of ssh-keygen; run: make release TAG=v0.2.0 KEY=~/.ssh/release" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)/sbom
	@$(VENV)/sbom/bin/python $(LOCKED) -r lock/sbom.txt
	@$(BIN)/python -m tools.release $(TAG) --key $(KEY) --sbom-python $(VENV)/sbom/bin/python

docs: $(READY) ## Make the documentation's site in build/site: docs/ and the pages that follow from the code
	@$(PYTHON) -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python $(LOCKED) -r lock/docs.txt
	@COLUMNS=100 $(BIN)/python -m tools.reference build/docs
	@rm -rf build/site
	@$(VENV)/docs/bin/sphinx-build -W --keep-going -q -b html build/docs build/site
	@echo "build/site/index.html"

lock: $(READY) ## Write lock/*.txt anew: the versions of constraints.txt with their hashes
	@$(BIN)/python tools/lock.py $(ARGS)

# A distribution of its own, which the demo and a user's run do without.
$(BENCH): $(READY) benchmarks/pyproject.toml
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation -e benchmarks
	@$(BIN)/python -m pip check
	@touch $@

bench: $(BENCH) ## Run a benchmark: make bench PRESET=fedrand/e2e ARGS=--quick; without PRESET, list them
	@$(BIN)/fedveil bench $(if $(PRESET),$(PRESET),--list) $(ARGS)

bench-test: $(TESTED) $(BENCH) ## Run the fast tests of the benchmarks, which make test leaves out (ARGS="-m long")
	@$(PYTEST) benchmarks/tests $(ARGS)
	@$(BIN)/python -m benchmarks.check

# Installs nothing: a machine with a GPU often has no network, and a torch of its own.
gpu: ## On a machine with CUDA: the tests marked gpu and the GPU presets, below 10 minutes (ARGS=--dry-run: on the CPU)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tools.gpu $(ARGS)

methods: $(READY) ## List the methods; one in full: make methods ARGS=fedrand
	@$(BIN)/fedveil methods $(ARGS)

clean: ## Remove caches and runs; .venv stays
	@rm -rf runs build dist .coverage coverage.xml .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache *.egg-info
