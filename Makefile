# Everything runs in a virtual environment of its own; `make demo` and `make test` set it up when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE # many processes start here, and each would compile all that it imports

.PHONY: demo test check lint types imports bench smoke docs proto fast plain clean

demo: $(VENV)/.serve ## serve the embedded model, load it, simulate the same, compare
	$(BIN)/squall demo
	@echo "(before these: . $(BIN)/activate)"

test: $(VENV)/.dev ## all tests; those that need the embedded model skip when it cannot be fetched
	-$(BIN)/squall model pull smollm2
	$(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile --no-loadscope-reorder

check: lint types imports test ## what a change must pass

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## every benchmark, each printing a table
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

smoke: $(VENV)/.dev ## every benchmark, just enough to see that it runs
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script --smoke || exit 1; done

docs: $(VENV)/.dev ## the pages that are made from the code
	$(BIN)/python -m squall.report.diagrams

proto: $(VENV)-proto/.ready ## the messages between head and workers, from squall.proto
	$(VENV)-proto/bin/python -m grpc_tools.protoc -Isquall/live/rpc/generated=squall/live/rpc --python_out=. --pyi_out=. squall/live/rpc/generated/squall.proto

fast: $(VENV)/.dev ## the simulator's hot modules as extension modules: twice as fast; again after a change to them
	$(BIN)/python tools/compile.py

plain: ## without them
	$(PYTHON) tools/compile.py --remove

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("squall needs Python 3.11 or newer; say make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[serve]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.serve

$(VENV)-proto/.ready: Makefile # the oldest compiler whose messages every protobuf that squall allows can read
	$(PYTHON) -m venv $(VENV)-proto
	$(VENV)-proto/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.62.3 'setuptools<80'
	touch $@

clean: plain
	rm -rf $(VENV) $(VENV)-proto .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
