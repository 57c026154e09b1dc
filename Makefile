# `make demo` and `make test` are all a newcomer needs; both make .venv on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet
RUNS := $(VENV)/.runs
INSTALLED := $(VENV)/.installed
# One more than a small machine's cores: tests wait for processes that they start. Long files first (tests/conftest.py).
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1

# Where modules are not kept compiled, as in many containers, each of hundreds of processes compiles them again.
unexport PYTHONDONTWRITEBYTECODE
# With `make -j`, two targets may install into the same environment.
.NOTPARALLEL:
# Also where an earlier one was interrupted before it had pip.
MAKE_VENV = $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)

.PHONY: demo test faults everywhere dist docs check format clean chromium

demo: $(RUNS)
	$(BIN)/memlens demo

test: $(INSTALLED) chromium
	$(PYTEST)

# All places at which a command can be killed, refused by the system or find a damaged file; `make test` tries a sample.
faults: $(INSTALLED)
	MEMLENS_FAULTS=all $(BIN)/python -m pytest tests/faults tests/index/test_ray_lost.py

# The tests as on other machines: vector units, threads, language, time zone, and a home where nobody can write.
TESTS ?= tests
MACHINES ?= default-3 avx2-1
everywhere: $(INSTALLED) chromium
	for machine in $(MACHINES); do \
	  ATEN_CPU_CAPABILITY=$${machine%-*} OMP_NUM_THREADS=$${machine#*-} LC_ALL=C TZ=Asia/Kolkata HOME=/proc/nowhere \
	    $(PYTEST) -p no:cacheprovider $(TESTS) || exit 1; \
	done

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The source distribution and the wheel: the same bytes for the same commit, whose time is the one in the archives.
dist: $(INSTALLED)
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -P -m build --no-isolation
	sha256sum dist/*

# The documentation as a site, in build/docs; a warning is an error.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs build/docs

# What the demo and the workbench it leads to need. Where pip's usual index gives a torch for GPUs (3 GB more), name one of
# CPU builds in PIP_EXTRA_INDEX_URL.
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
