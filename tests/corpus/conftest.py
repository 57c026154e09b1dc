"""A corpus's files, compressed as people keep them."""

import gzip
from collections.abc import Callable

import pyarrow as pa
import pytest


@pytest.fixture
def compress() -> Callable[[bytes, str], bytes]:
    """Bytes and an ending, "", ".gz" or ".zst", to the bytes of such a file."""

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
