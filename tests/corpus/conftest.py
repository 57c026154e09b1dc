"""Compressed corpus files."""

import gzip
from collections.abc import Callable

import pyarrow as pa
import pytest


@pytest.fixture
def compress() -> Callable[[bytes, str], bytes]:
    """Return a function that compresses bytes for a file with the ending "", ".gz" or ".zst"."""

    def compressed(data: bytes, ending: str) -> bytes:
        if ending == ".gz":
            return gzip.compress(data)
        if ending == ".zst":
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as stream:
                stream.write(data)
            return sink.getvalue().to_pybytes()
        return data

    return compressed
