"""From a model and a corpus to a complete index, in stages that can be stopped at any moment and continued.

    plan      partial/plan.json: which model, corpus and settings this scan is of
    corpus    partial/corpus.parquet and the flat arrays beside it
    scan      partial/state.npz, saved at intervals and when stopped
    tables    partial/*.parquet: triggers, memories, ordinary, vocabulary
    publish   the tables move up into the folder, then manifest.json, last

What may be in the folder before and after is staging's business, what is computed the scan's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memlens import __version__
from memlens.corpus import Batch, CorpusSettings, Sentence, corpus_fingerprint, read_units, tokenize_units
from memlens.errors import IndexFolderError, SettingError
from memlens.index import staging
from memlens.index.corpus_store import CorpusStore
from memlens.index.files import checksum, explain_os_errors, only_writer, replacing, write_json
from memlens.index.layout import LOCK, MANIFEST, PARTIAL, SCAN_TABLES, SCHEMA_VERSION
from memlens.index.stopping import Stopper, stop_on_signal
from memlens.index.tables import write_scan_tables, write_vocabulary
from memlens.models.memory_model import MemoryModel
from memlens.scan.sample import bin_edges
from memlens.scan.scanner import Scanner, bos_to_feed
from memlens.scan.settings import WINDOW, ScanSettings, choose_layers
from memlens.scan.state import ScanState

SAVE_SECONDS = 15.0  # at least so long between two saves,
_SAVE_SHARE = 50  # and at least so many times as long as a save takes


class Progress(Protocol):
    """Told how far a stage is; `total` is None while nobody can know."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def no_progress(stage: str, done: int, total: int | None) -> None:
    """For callers who do not look."""


def build_index(
    model: MemoryModel,
    corpus: CorpusSettings,
    settings: ScanSettings,
    folder: Path,
    *,
    resume: bool = True,
    progress: Progress = no_progress,
    save_seconds: float = SAVE_SECONDS,
) -> None:
    """Make `folder` the index of this model and corpus; continues what an interrupted call began."""
    layers = choose_layers(settings.layers, len(model.layers))
    max_length = _longest_sentence(model, settings)
    plan = _make_plan(model, corpus, settings, layers)
    staging.refuse_inside(folder, corpus.sources)
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        staging.refuse_foreign(folder)
    with only_writer(folder / LOCK), stop_on_signal() as stopper:
        if resume and staging.is_finished(folder, plan):
            return
        staging.begin(folder, plan, resume)
        partial = folder / PARTIAL
        store = _corpus_stage(model, corpus, settings, max_length, partial, progress, stopper)
        state = ScanState.start(model, layers, settings)
        saver = _Saver(partial / "state.npz", state, save_seconds)
        _scan_stage(Scanner(model, settings, state), store, saver, progress, stopper)
        progress("tables", 0, None)
        with explain_os_errors(folder):
            write_scan_tables(partial, state, store)
            write_vocabulary(partial, model.tokenizer, model.vocabulary)
            staging.replace_tables(folder)
            write_json(folder / MANIFEST, _manifest(model, layers, plan, store, state, folder))
            staging.throw_partial_away(folder)


def _longest_sentence(model: MemoryModel, settings: ScanSettings) -> int | None:
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


def _make_plan(
    model: MemoryModel, corpus: CorpusSettings, settings: ScanSettings, layers: tuple[int, ...]
) -> dict[str, Any]:
    """What must be equal for a scan to be continued; JSON only."""
    return {
        "schema": SCHEMA_VERSION,
        "model": model.fingerprint(),
        "corpus": corpus_fingerprint(corpus),
        "settings": {**settings.to_json(), "layers": list(layers)},
        "window": WINDOW,
    }


def _corpus_stage(
    model: MemoryModel,
    corpus: CorpusSettings,
    settings: ScanSettings,
    max_length: int | None,
    partial: Path,
    progress: Progress,
    stopper: Stopper,
) -> CorpusStore:
    if CorpusStore.exists(partial):
        return CorpusStore(partial)

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


def _scan_stage(scanner: Scanner, store: CorpusStore, saver: _Saver, progress: Progress, stopper: Stopper) -> None:
    state, all_tokens = scanner.state, store.counts["tokens"]
    saver.restore_()

    def after_batch(batch: Batch) -> None:
        progress("scan", state.tokens, all_tokens)
        if stopper.stopped:
            saver.save()
        stopper.check()
        saver.save_if_due()

    progress("scan", state.tokens, all_tokens)
    for number in range(store.windows):
        scanner.scan_window(number, store.window(number), after_batch)
    saver.save()
    progress("scan", all_tokens, all_tokens)


class _Saver:
    """Writes the state now and then, seldom enough to cost next to nothing."""

    def __init__(self, path: Path, state: ScanState, seconds: float) -> None:
        self.path, self.state, self.seconds = path, state, seconds
        self.next_save = time.monotonic() + seconds

    def restore_(self) -> None:
        if self.path.is_file():
            self.state.restore_(_load_arrays(self.path))

    def save_if_due(self) -> None:
        if time.monotonic() >= self.next_save:
            self.save()

    def save(self) -> None:
        began = time.monotonic()
        with replacing(self.path) as beside, beside.open("wb") as handle:
            np.savez(handle, allow_pickle=False, **self.state.arrays())
        now = time.monotonic()
        self.next_save = now + max(self.seconds, _SAVE_SHARE * (now - began))


def _load_arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as saved:
            return dict(saved)
    except Exception as error:  # a damaged archive fails in many ways, none of which is ours to tell apart
        raise IndexFolderError(f"{path} is damaged; start over with --fresh") from error


def _manifest(
    model: MemoryModel,
    layers: tuple[int, ...],
    plan: dict[str, Any],
    store: CorpusStore,
    state: ScanState,
    folder: Path,
) -> dict[str, Any]:
    first = model.layers[0]
    return {
        "memlens": __version__,
        "schema": SCHEMA_VERSION,
        "plan": plan,
        "model": {
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
        },
        "layers": list(layers),
        "counts": {**store.counts, "prefixes": state.prefixes, "tokens_fed": state.tokens},
        "histogram_edges": bin_edges(),
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": checksum(folder / name)} for name in SCAN_TABLES
        },
    }
