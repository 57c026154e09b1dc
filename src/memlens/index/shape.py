"""What every manifest must hold for an index to be read; one that lacks it is refused by name, never guessed at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memlens.errors import IndexFolderError

# What every manifest has, and of what kind it is.
_PARTS = {
    "schema": int,
    "plan": dict,
    "model": dict,
    "layers": list,
    "counts": dict,
    "histogram_edges": list,
    "files": dict,
}
_COUNTS = ("sentences", "tokens", "prefixes")


def refuse_misshapen(manifest: dict[str, Any], path: Path) -> None:
    """Refuse a manifest that is not of the shape that readers rely on."""
    missing = [part for part, kind in _PARTS.items() if not _is(manifest.get(part), kind)]
    wrong = missing[0] if missing else _wrong_inside(manifest)
    if wrong:
        raise IndexFolderError(f"{path} is damaged: it has no usable '{wrong}'; scan again with --fresh")


def _wrong_inside(manifest: dict[str, Any]) -> str:
    layers, model = manifest["layers"], manifest["model"]
    if not layers or not all(_is(layer, int) for layer in layers):
        return "layers"
    memories = model.get("memories")
    if not _is(memories, dict) or not all(_is(memories.get(str(layer)), int) for layer in layers):
        return "model"
    if not isinstance(model.get("name"), str):
        return "model"
    if not _is(manifest["plan"].get("settings"), dict):
        return "plan"
    if not all(_is(manifest["counts"].get(name), int) for name in _COUNTS):
        return "counts"
    for entry in manifest["files"].values():
        if not (_is(entry, dict) and _is(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)):
            return "files"
    return ""


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
