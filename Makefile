# Two commands: `make serve` and `make test`. Both set everything up first; a second run finds it done.
# Settings are environment variables or `make serve PORT=9000 WORKERS=2`; docs/operating.md lists them.

# The first Python that is new enough, unless PYTHON says which.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Tests that say how long something may take: one after the other, with the machine to themselves.
TIMED := tests/e2e tests/faults tests/bench tests/tasks/worker/test_process.py tests/app/test_serve.py tests/app/test_clients.py

.PHONY: serve test check setup setup-dev demo bench bench-peers soak conformance clean

serve: setup
	@exec $(BIN)/tokenferry serve

test: setup-dev check
	$(BIN)/tokenferry pull smollm2-135m-instruct
	$(BIN)/python -m pytest -q -n 2 --dist loadscope $(addprefix --ignore=,$(TIMED))
	$(BIN)/python -m pytest -q $(TIMED)

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

demo: setup
	@exec $(BIN)/tokenferry demo

# This server by itself, about ten minutes on a quiet machine: writes bench/OWN.md, bench/QUALITY.md, bench/growth.svg.
bench: setup-dev
	$(BIN)/tokenferry pull smollm2-135m-instruct
	$(BIN)/python -m bench.own

bench-peers: setup-dev
	$(BIN)/tokenferry pull smollm2-135m-instruct
	$(BIN)/python -m bench.peers --install --runs 3

# Faults of every kind at a real server for MINUTES; SEED=n repeats the schedule of another run. Writes the report.
soak: setup-dev
	$(BIN)/tokenferry pull smollm2-135m-instruct
	$(BIN)/python -m bench.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) --report bench/RELIABILITY.md

# Clients of other people as judges of the surface, in an environment of their own; needs node 20.
conformance: setup-dev
	$(BIN)/tokenferry pull smollm2-135m-instruct
	$(BIN)/python -m tests.conformance

setup: $(VENV)/installed

setup-dev: $(VENV)/installed-dev

$(VENV)/created:
	@test -n "$(PYTHON)" || { echo "tokenferry needs Python 3.11 or newer; PYTHON=/path/to/python3 make ... names one" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	@touch $@

# torch first and by itself: pip then takes a build for this machine where it has one, and one that is already
# installed in the environment (for a GPU, say) stays.
$(VENV)/torch: | $(VENV)/created
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	@touch $@

$(VENV)/installed: pyproject.toml | $(VENV)/torch
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/torch
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) .conformance .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
