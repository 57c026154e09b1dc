"""A simulated full disk: after some bytes, writing to any file fails."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    resource = pytest.importorskip("resource", reason="this system has no limit on the size of files")
    before, is_keeping = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # otherwise Python would leave incomplete compiled modules, which fail later
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = is_keeping
