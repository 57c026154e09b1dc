"""Older indexes are read as if they were new: here alone a manifest of an earlier schema is brought up to date.

A step takes the manifest of one version to the next; the file on disk stays as it is until a stage writes it anyway.
There is one version so far, so there are no steps yet. An index of a later version is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memlens.errors import IndexFolderError
from memlens.index.layout import SCHEMA_VERSION

Manifest = dict[str, Any]
# version -> what makes its manifest one of the next version
STEPS: Mapping[int, Callable[[Manifest], Manifest]] = {}


def migrated(
    manifest: Manifest,
    folder: Path,
    steps: Mapping[int, Callable[[Manifest], Manifest]] = STEPS,
    newest: int = SCHEMA_VERSION,
) -> Manifest:
    """The manifest as this memlens writes it; refused where that cannot be."""
    found = manifest["schema"]
    for version in range(found, newest):
        if version not in steps:
            break
        manifest = {**steps[version](manifest), "schema": version + 1}
    if manifest["schema"] != newest:
        newer = found > newest
        advice = "install a newer memlens" if newer else "scan again with --fresh"
        raise IndexFolderError(
            f"{folder} has schema version {found}, this memlens reads {'up to ' if newer else ''}{newest}; {advice}"
        )
    return manifest
