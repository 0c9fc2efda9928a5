# Every target makes its own set-up: `make demo` and `make test` need no earlier step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= qkv-demo

.DEFAULT_GOAL := help
.PHONY: help venv demo test quick fuzz lint docs docs-serve claims trials figures bench models experiments dist clean

help:  ## this text
	@echo "qkv: attention you can compose, measure and explain"
	@echo
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(VENV)/.ready  ## the development environment in .venv, pinned by constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qkv needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv  ## profile the model that comes with qkv, then an 8,192-token one beside plain SDPA; writes OUT=qkv-demo
	$(BIN)/qkv profile --out $(OUT)/mini
	$(BIN)/qkv generate qkv-mini "class Stack:" --tokens 120 --seed 0
	$(BIN)/python -m benchmarks.demo --out $(OUT)/long
	@echo
	@echo "Open the reports in a browser:"
	@echo "  $(OUT)/mini/report.html     qkv-mini, which has read Python: where its 24 heads attend"
	@echo "  $(OUT)/long/report.html     a causal model at 8,192 tokens"
	@echo "or look around in the viewer: $(BIN)/qkv view $(OUT)/mini, or, with any map of it exact: $(BIN)/qkv view"

# A process a core, so one thread in each and in what it starts: more would wait for one another.
ALONE := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

test: venv lint  ## every check: lint, types, all tests
	$(ALONE) $(BIN)/python -m pytest -n auto

quick: venv  ## the tests that take no more than a few seconds each
	$(ALONE) $(BIN)/python -m pytest -n auto -m "not slow"

CASES ?= 10000
SEED  ?= 0

fuzz: venv  ## CASES=10000 random compositions from SEED=0 against a dense float64 formula; prints how to replay a failure
	$(ALONE) $(BIN)/python -m fuzz --cases $(CASES) --seed $(SEED) --jobs 2

lint: venv  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

MECHANISMS := benchmarks/results/mechanisms
SOME := causal sink off-by-one key-bias alibi window bigbird longformer sigmoid elu linear

bench: venv  ## all benchmarks, about an hour and a quarter; writes benchmarks/results
	$(BIN)/python -m benchmarks
	$(BIN)/qkv bench --lengths 512 1024 2048 4096 8192 16384 --memory 4096 8192 16384 --seconds 1.5 --out $(MECHANISMS)
	$(BIN)/qkv bench --backward --lengths 1024 2048 4096 8192 --memory 2048 4096 8192 --seconds 1 --out $(MECHANISMS)
	$(BIN)/qkv bench $(SOME) --lengths 1024 2048 4096 8192 --heads 4 --seconds 1 --out $(MECHANISMS)
	$(BIN)/qkv bench $(SOME) --lengths 1024 2048 4096 8192 --dtype bfloat16 --seconds 1 --out $(MECHANISMS)

TRAINED := src/qkv/models/trained

models: venv  ## the models that come with the package, trained again on one core, about an hour and a half
	for m in qkv-reversal qkv-translation qkv-caption qkv-mini; do \
	  $(BIN)/qkv train --config $(TRAINED)/$$m/run.toml --out qkv-runs/$$m --threads 1 && \
	  cp qkv-runs/$$m/model/* qkv-runs/$$m/metrics.jsonl qkv-runs/$$m/result.json $(TRAINED)/$$m/ || exit 1; \
	done

experiments: venv  ## all experiments of the lab, about an hour on two cores; writes docs/experiments
	$(BIN)/qkv experiment all --jobs 2 --out docs/experiments

SITE := docs/_build/html

docs: venv  ## the documentation site, every page executed, warnings as errors; writes docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -j 2 -b html -d docs/_build/doctrees docs $(SITE)
	@echo "Open $(SITE)/index.html, or: make docs-serve"

docs-serve: docs  ## the same, served on http://127.0.0.1:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory $(SITE)

claims: venv  ## the ledger of claims: every check run; writes docs/claims
	$(BIN)/python -m ledger

trials: venv  ## the small trainings that some claims rest on, run again, about half an hour; writes ledger/results
	$(BIN)/python -m ledger.trials all

figures: venv  ## the figures and numbers in README.md and docs/ that are kept, made again; about ten minutes
	$(BIN)/python docs/make_figures.py

dist: venv  ## wheel and sdist; writes dist
	rm -rf dist
	$(BIN)/python -m build --quiet

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(OUT) docs/_build docs/reference qkv-profile qkv-survey qkv-evict qkv-flow build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
