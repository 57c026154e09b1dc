"""Vega, Vega-Lite and their embedder as one piece of JavaScript, made once and kept in the user's cache.

Making it takes some seconds; it depends on nothing but the version of the library that holds it. A cache that cannot be
written or that holds something else is done without. No network is needed.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import vl_convert

from memlens.errors import IndexFolderError
from memlens.index.files import replacing

_SNIPPET = "window.vegaEmbed = vegaEmbed;"


def vega_bundle() -> str:
    """JavaScript for a module script; afterwards `window.vegaEmbed` draws a chart."""
    path = _cache_folder() / f"vega-{version('vl-convert-python')}.js"
    kept = _read(path)
    if kept is not None:
        return kept
    bundle: str = vl_convert.javascript_bundle(_SNIPPET)
    bundle = bundle.replace("</script", "<\\/script")  # inside a page this would end the script
    with suppress(OSError, IndexFolderError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_bytes(_seal(bundle.encode()) + bundle.encode())
    return bundle


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    # the specification of these variables says to ignore a relative path
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "memlens"


def _seal(content: bytes) -> bytes:
    """A first line from which a damaged or foreign file is known."""
    return b"// " + hashlib.sha256(content).hexdigest().encode() + b"\n"


def _read(path: Path) -> str | None:
    try:
        seal, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content.decode() if seal + b"\n" == _seal(content) else None
