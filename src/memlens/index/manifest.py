"""manifest.json: what an index is of, and the size and checksum of every file. Written last, when all else is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memlens import __version__
from memlens.index.files import facts_of
from memlens.index.layout import SCAN_TABLES, SCHEMA_VERSION
from memlens.models.memory_model import MemoryModel
from memlens.scan.sample import bin_edges
from memlens.scan.scanner import bos_to_feed
from memlens.scan.settings import ScanSettings


def model_facts(model: MemoryModel, plan: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says about the model."""
    first = model.layers[0]
    return {
        "name": model.name,
        "source": model.source,
        "family": model.family,
        "fingerprint": plan["model"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "width": model.width,
        "vocabulary": model.vocabulary,
        "activation": first.activation,
        "gated": first.gated,
        "memories": {str(block.layer): block.memories for block in model.layers},
        "bos": bos_to_feed(model, ScanSettings(bos=plan["settings"]["bos"])),
    }


def make_manifest(
    model: dict[str, Any], plan: dict[str, Any], counts: dict[str, Any], prefixes: int, tokens: int, folder: Path
) -> dict[str, Any]:
    """`model` as model_facts gives it, `counts` of the corpus, what the scan has fed; the tables are in `folder`."""
    return {
        "memlens": __version__,
        "schema": SCHEMA_VERSION,
        "plan": plan,
        "model": model,
        "layers": list(plan["settings"]["layers"]),
        "counts": {**counts, "prefixes": prefixes, "tokens_fed": tokens},
        "histogram_edges": bin_edges(),
        "files": {name: facts_of(folder / name) for name in SCAN_TABLES},
    }
