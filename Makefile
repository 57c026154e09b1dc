# `make demo` and `make test` are all a newcomer needs; both make .venv on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip --quiet
RUNS := $(VENV)/.runs
INSTALLED := $(VENV)/.installed
# One more than a small machine's cores: tests wait for processes that they start.
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --max-worker-restart 1

# Without compiled modules on disk, each of the hundreds of processes that tests start would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# With `make -j`, two targets may install into the same environment.
.NOTPARALLEL:
# Also where an earlier one was interrupted before it had pip.
MAKE_VENV = $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)

.PHONY: demo gallery smoke test test-all sweeps everywhere mutations dist docs check format clean chromium

demo: $(RUNS)
	$(BIN)/memlens demo

# Pages about selected memories of SmolLM2, from the model and the index of examples/smollm2/README.md.
SMOLLM2 ?= ../memlens-smollm2
gallery: $(INSTALLED)
	$(BIN)/python examples/smollm2/gallery.py $(SMOLLM2)/index $(SMOLLM2)/gallery --model $(SMOLLM2)/smollm2.gguf

# Loading, scanning, values, a lookup, a page and the golden numbers, in less than 40 seconds.
smoke: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_smoke.py tests/golden

# Every capability at least once with real components.
test: $(INSTALLED) chromium
	$(PYTEST)

# The default suite and the sweeps. `.ci/run` runs only the default suite.
test-all: test sweeps

# What `make test` leaves out: all model types, crash points, bit flips, bad inputs and browser sizes, the wheel, the
# notebook, many examples of each property, and tests of numbers on other vector units and thread counts.
sweeps: $(INSTALLED) chromium
	$(PYTEST) -m sweep --hypothesis-profile many
	$(MAKE) everywhere TESTS='tests/golden tests/scanner tests/vocab'

# The default suite as on other machines: vector units, threads, language, time zone, and a home that is read-only.
TESTS ?= tests
MACHINES ?= default-3 avx2-1
everywhere: $(INSTALLED) chromium
	for machine in $(MACHINES); do \
	  ATEN_CPU_CAPABILITY=$${machine%-*} OMP_NUM_THREADS=$${machine#*-} LC_ALL=C TZ=Asia/Kolkata HOME=/proc/nowhere \
	    $(PYTEST) -p no:cacheprovider $(TESTS) || exit 1; \
	done

# Whether the default suite notices 40 faults seeded into a copy of the sources: `make mutations FAULTS=1-10`.
mutations: $(INSTALLED)
	$(BIN)/python tests/mutations.py $(FAULTS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The source distribution and the wheel. Files carry the time of the commit, so that the same commit gives the same bytes.
dist: $(INSTALLED)
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -P -m build --no-isolation
	sha256sum dist/*

# Build the documentation in build/docs. Warnings are errors.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs build/docs

# What the demo and the workbench need. If pip's default index offers a GPU build of torch (3 GB more), set
# PIP_EXTRA_INDEX_URL to an index of CPU builds.
$(RUNS): pyproject.toml constraints.txt
	$(MAKE_VENV)
	$(PIP) install --constraint constraints.txt --editable '.[serve]'
	touch $@

# All that the tests need, in one step.
$(INSTALLED): pyproject.toml constraints.txt
	$(MAKE_VENV)
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $(RUNS) $@

# The browser tests drive Debian's chromium; elsewhere install it (or Chrome) yourself.
chromium:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "chromium is not installed: the browser tests will fail; install it with your system's packages"

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
