"""One number for a corpus and how it is cut: equal for the same text wherever it lies, different after any change.

This module reads bytes as they are on disk; it knows nothing of what they say.
"""

from __future__ import annotations

import hashlib
import json

from memlens.corpus.hub import hub_fingerprint
from memlens.corpus.settings import CorpusSettings, HubSpec, is_hub_source
from memlens.corpus.sources import SourceFile, list_files
from memlens.corpus.streams import CHUNK, open_raw, unreadable


def corpus_fingerprint(settings: CorpusSettings) -> str:
    """sha256 over the files' names and bytes in reading order, and over unit, column and language."""
    entries: list[list[str]] = [["settings", settings.unit, settings.column, settings.language]]
    for source in settings.sources:
        if is_hub_source(source):
            spec = HubSpec.parse(source)
            entries.append(["hub", str(spec), hub_fingerprint(spec)])
        else:
            entries.extend(["file", file.name, _digest(file)] for file in list_files(source))
    # JSON keeps the borders between the parts, so that no two corpora are written alike
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _digest(file: SourceFile) -> str:
    digest = hashlib.sha256()
    with open_raw(file) as stream:
        try:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
        except OSError as problem:
            raise unreadable(file, problem) from None
    return digest.hexdigest()
