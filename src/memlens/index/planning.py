"""What a scan is of: its plan, which must be equal for work to be continued or joined, and the sentences to be scanned.

This module knows the model, the corpus and the settings; where work runs and what is kept is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memlens.corpus import CorpusSettings, Sentence, corpus_fingerprint, read_units, tokenize_units
from memlens.errors import SettingError
from memlens.index.corpus_store import CorpusStore
from memlens.index.layout import SCHEMA_VERSION
from memlens.index.progress import Progress
from memlens.index.stopping import Stopper
from memlens.models.memory_model import MemoryModel
from memlens.scan.done import Share
from memlens.scan.scanner import bos_to_feed
from memlens.scan.settings import WINDOW, ScanSettings


def longest_sentence(model: MemoryModel, settings: ScanSettings) -> int | None:
    """How many own tokens a sentence may have, BOS not counted."""
    bos = bos_to_feed(model, settings)
    if settings.bos == "yes" and bos is None:
        raise SettingError(f"--bos is yes, but the tokenizer of {model.name} has no BOS token; use --bos auto or no")
    if bos is not None and bos >= model.vocabulary:
        raise SettingError(f"BOS is token {bos}, but {model.name} has only {model.vocabulary}; use --bos no")
    if settings.bos_prefix and bos is None:
        advice = "leave the preset out" if model.tokenizer.bos is None else "add --bos yes"
        raise SettingError(f"the preset needs BOS in front of a sentence, which {model.name} is not fed: {advice}")
    room = None if model.context is None else model.context - (bos is not None)
    if settings.max_length is None or room is None:
        return settings.max_length or room
    return min(settings.max_length, room)


def make_plan(
    model: MemoryModel,
    corpus: CorpusSettings,
    settings: ScanSettings,
    layers: tuple[int, ...],
    share: Share | None = None,
) -> dict[str, Any]:
    """What must be equal for a scan to be continued; JSON only."""
    plan = {
        "schema": SCHEMA_VERSION,
        "model": model.fingerprint(),
        "corpus": corpus_fingerprint(corpus),
        "settings": {**settings.to_json(), "layers": list(layers)},
        "window": WINDOW,
    }
    return plan if share is None else {**plan, "shard": str(share)}


def corpus_stage(
    model: MemoryModel,
    corpus: CorpusSettings,
    settings: ScanSettings,
    max_length: int | None,
    partial: Path,
    progress: Progress,
    stopper: Stopper,
) -> CorpusStore:
    if CorpusStore.exists(partial):
        store = CorpusStore(partial)
        store.refuse_damage()
        return store

    def report(sentences: int) -> None:
        progress("corpus", sentences, None)
        stopper.check()

    sentences = tokenize_units(
        read_units(corpus),
        model.tokenizer.encode,
        max_length=max_length,
        max_tokens=settings.max_tokens,
        block=corpus.block,
    )
    return CorpusStore.create(partial, _checked(sentences, model), settings.dedup, report)


def _checked(sentences: Iterator[Sentence], model: MemoryModel) -> Iterator[Sentence]:
    """Refuse tokens that the model has no embedding for, before they fail deep inside it."""
    for sentence in sentences:
        if max(sentence.tokens) >= model.vocabulary:
            raise SettingError(
                f"the tokenizer gives token {max(sentence.tokens)} at {sentence.source}, but {model.name} has only "
                f"{model.vocabulary}; use the tokenizer that belongs to the model"
            )
        yield sentence
