# Two commands do everything on a machine with Python 3.11+ and make: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# verl wants other versions of half of it, and 3 GB: an environment of its own.
VERL := .venv-verl
VERL_STAMP := $(VERL)/.installed
RECIPE ?= tiny

.PHONY: train test test-verl lint bench lab clean

train: $(STAMP)
	$(BIN)/llds train $(RECIPE) $(ARGS)

test: $(STAMP) lint
	$(BIN)/python -m pytest $(ARGS)

# LLDS inside the real verl: its worker, and its whole trainer on Ray.
test-verl: $(VERL_STAMP)
	$(VERL)/bin/python -m pytest tests/verl $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# The main figure of docs/lab.md from runs of your own, in runs/lab; minutes on two cores.
lab: $(STAMP)
	$(BIN)/llds lab sweep --regimes far --arms grpo,llds,llds-anchor,kl100,llds+kl100 --seeds 5 --series runs/lab/series $(ARGS)
	$(BIN)/llds lab report --series runs/lab/series --page runs/lab/report.md

# An old Python would be told only after torch was fetched. The stamp is made last, so an interrupted installation starts again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llds needs Python 3.11 or newer; name it, for example: make train PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

$(VERL_STAMP): pyproject.toml constraints-verl.txt
	test -x $(VERL)/bin/pip || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints-verl.txt torch
	$(VERL)/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints-verl.txt --editable ".[verl-dev]"
	touch $(VERL_STAMP)

clean:
	rm -rf $(VENV) $(VERL) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
