# `make demo` and `make test` are all a newcomer needs; both make .venv on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= 2

.PHONY: demo test faults everywhere wheel check format clean chromium

demo: $(INSTALLED)
	$(BIN)/memlens demo

test: $(INSTALLED) chromium
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

# All places at which a command can be killed, refused by the system or find a damaged file; `make test` tries a sample.
faults: $(INSTALLED)
	MEMLENS_FAULTS=all $(BIN)/python -m pytest tests/faults

# Tests whose numbers could hang on a processor's vector units, threads, language, time zone or home folder.
everywhere: $(INSTALLED)
	for unit in default avx2; do for threads in 1 3; do \
	  ATEN_CPU_CAPABILITY=$$unit OMP_NUM_THREADS=$$threads LC_ALL=C TZ=Asia/Kolkata HOME=/nonexistent \
	    $(BIN)/python -m pytest -q -p no:cacheprovider tests/golden tests/scanner tests/vocab || exit 1; \
	done; done

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The same bytes for the same commit; the time in the archive is the commit's.
wheel: $(INSTALLED)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -P -m hatchling build -t wheel -d dist
	sha256sum dist/memlens-*.whl

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The browser tests drive Debian's chromium; elsewhere install it (or Chrome) yourself.
chromium:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "chromium is not installed: the browser tests will fail; install it with your system's packages"

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
