"""Builds an index from a model and a corpus, in stages that can be stopped at any moment and continued.

plan      partial/plan.json: which model, corpus and settings this scan is of
corpus    partial/corpus.parquet and the flat arrays beside it
scan      partial/parts: what workers have found, saved at intervals and when stopped
tables    partial/*.parquet: triggers, memories, ordinary, vocabulary
publish   the tables move up into the folder, then manifest.json, last
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from memlens import __version__
from memlens.corpus.sentences import corpus_fingerprint, corpus_stamps
from memlens.errors import SettingError
from memlens.files import FileFacts, explain_os_errors, lock_for_writing
from memlens.index import shards, staging
from memlens.index.corpus_reading import TextOrder, read_text
from memlens.index.corpus_store import CorpusStore
from memlens.index.layout import (
    CORPUS,
    LOCK,
    PARTIAL,
    PARTS,
    SCHEMA_VERSION,
    VOCABULARY,
    Manifest,
    made_with,
)
from memlens.index.tables import JoinedParts, write_scan_tables, write_vocabulary
from memlens.models.memory_model import MemoryModel
from memlens.parallel import Progress, Stopper, no_progress, stop_on_signal
from memlens.scanner.autotune import refuse_large_lists
from memlens.scanner.executors import SAVE_SECONDS, Executor, ModelRecipe, ScanJob, SerialExecutor
from memlens.scanner.lists import EDGES
from memlens.scanner.sample import bin_edges
from memlens.scanner.scanner import ScanSentence, bos_to_feed, plan_batches
from memlens.scanner.state import (
    BatchRange,
    LayerShape,
    PartFolder,
    ShardNumber,
    ranges_left,
    shapes_of,
    wait_for_orphans,
)
from memlens.settings import WINDOW, CorpusSettings, ScanSettings, choose_layers


def longest_sentence(model: MemoryModel, settings: ScanSettings) -> int | None:
    """The number of tokens that a sentence may have, BOS not counted."""
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
    shard: ShardNumber | None = None,
) -> dict[str, Any]:
    """The plan of a scan, as plain JSON: all that must be equal for the scan to be continued."""
    plan = {
        "schema": SCHEMA_VERSION,
        "model": model.fingerprint(),
        "corpus": corpus_fingerprint(corpus),
        "settings": {**settings.to_json(), "layers": list(layers)},
        "window": WINDOW,
    }
    return plan if shard is None else {**plan, "shard": str(shard)}


def corpus_stage(order: TextOrder, progress: Progress, stopper: Stopper) -> CorpusStore:
    """The sentences to be scanned: those of the unfinished scan in partial/, or read from the corpus."""
    if CorpusStore.exists(order.folder):
        return CorpusStore.verified(order.folder)

    def report(read: int) -> None:
        progress("corpus", read, None)
        stopper.check()

    report(0)
    read_text(order, report, stopper.check)
    return CorpusStore(order.folder)


def build_index(
    model: MemoryModel,
    corpus: CorpusSettings,
    settings: ScanSettings,
    folder: Path,
    *,
    resume: bool = True,
    progress: Progress = no_progress,
    save_seconds: float = SAVE_SECONDS,
    executor: Executor | None = None,
    shard: ShardNumber | None = None,
    layer_budget: int | None = None,
    device_map: Any = None,
    text_processes: int = 1,
) -> dict[str, Any]:
    """Make `folder` the index of this model and corpus; continues what an interrupted call began. Its plan comes back.

    `executor` None works in this process. With a `shard` the folder becomes that shard, for `merge_shards`. At most
    `layer_budget` layers are scanned in one pass over the corpus. `device_map` is what the model was loaded with, for
    workers that load it again. `text_processes` cut and tokenize a long text. None of these changes the result.
    """
    if layer_budget is not None and layer_budget < 1:
        raise SettingError(f"--layer-budget is {layer_budget}; it must be 1 or more")
    layers = layers_to_scan(model, settings)
    shapes = shapes_of(model, layers, settings)
    refuse_large_lists(shapes, settings, layer_budget)
    max_length = longest_sentence(model, settings)
    stamps = corpus_stamps(corpus)  # before the fingerprint, which is the plan's
    plan = make_plan(model, corpus, settings, layers, shard)
    staging.refuse_inside(folder, corpus.sources)
    if resume:
        staging.refuse_newer(folder)  # before the lock, which would be left in it
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        staging.refuse_foreign(folder)
    with lock_for_writing(folder / LOCK), stop_on_signal() as stopper:
        wait_for_orphans(folder)
        if resume and (staging.is_finished(folder, plan) or shards.is_finished(folder, plan)):
            return plan

        def recipe() -> ModelRecipe:
            return ModelRecipe.of(model, plan["model"], device_map)

        order = TextOrder(
            folder / PARTIAL, corpus, stamps, model.tokenizer, model.name, model.vocabulary,
            max_length, settings.max_tokens, settings.dedup, text_processes,
        )  # fmt: skip
        scan = _Scan(
            model, recipe, settings, shapes, shard, progress, stopper, executor or SerialExecutor(), layer_budget,
            PartFolder(folder / PARTIAL / PARTS), save_seconds,
        )  # fmt: skip
        with staging.nothing_left_if_refused(folder):
            staging.begin(folder, plan, resume)
            store = corpus_stage(order, progress, stopper)
        scanned = scan.run(store)
        progress("tables", 0, None)
        with explain_os_errors(folder):
            vocabulary = write_vocabulary(folder / PARTIAL, model.tokenizer, model.vocabulary)
            facts = model_facts(model, plan)
            if shard is None:
                made_by = staging.scanned_with(folder)
                publish(folder, scanned, store, vocabulary, facts, plan, made_by)
            else:
                shards.finish(folder, facts, plan, shapes, store)
    return plan


def publish(
    folder: Path,
    scanned: JoinedParts,
    store: CorpusStore,
    vocabulary: FileFacts,
    model: dict[str, Any],
    plan: dict[str, Any],
    scanned_with: Sequence[dict[str, str]],
) -> None:
    """Make an index of a finished scan in partial/, with corpus and vocabulary there.

    Checksums are those of what was written, not of what is found: a table that was changed since shows.
    """
    files = {CORPUS: store.files[CORPUS], VOCABULARY: vocabulary, **write_scan_tables(folder / PARTIAL, scanned, store)}
    content = make_manifest(model, plan, store.counts, scanned.prefixes, scanned.tokens, files)
    manifest = Manifest({**content, "scanned_with": list(scanned_with)})
    store.refuse_changes()
    staging.replace_tables(folder, files)
    manifest.write(folder)
    staging.throw_partial_away(folder)


def layers_to_scan(model: MemoryModel, settings: ScanSettings) -> tuple[int, ...]:
    """The layers asked for, or all that have memories."""
    layers = choose_layers(settings.layers, len(model.layers))
    empty = [layer for layer in layers if not model.layers[layer].groups]
    if empty and settings.layers is not None:
        raise SettingError(f"layer {empty[0]} of {model.name} has no memories; leave it out of --layers")
    return tuple(layer for layer in layers if layer not in empty)


def model_facts(model: MemoryModel, plan: dict[str, Any]) -> dict[str, Any]:
    """The facts about the model that a manifest holds."""
    first = model.first
    dense = [tuple(group.kind for group in block.groups) == ("dense",) for block in model.layers]
    groups = {
        str(block.number): [[group.kind, group.count, group.size] for group in block.shape]
        for block, is_dense in zip(model.layers, dense, strict=True)
        if not is_dense
    }
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
        "memories": {str(block.number): block.memories for block in model.layers},
        "bos": bos_to_feed(model, ScanSettings(bos=plan["settings"]["bos"])),
        **({"groups": groups} if groups else {}),
    }


def make_manifest(
    model: dict[str, Any],
    plan: dict[str, Any],
    counts: dict[str, Any],
    prefixes: int,
    tokens: int,
    files: Mapping[str, FileFacts],
) -> dict[str, Any]:
    """`model` as model_facts gives it, `counts` of the corpus, what the scan has fed, size and checksum of tables."""
    return {
        "memlens": __version__,
        "schema": SCHEMA_VERSION,
        "plan": plan,
        "model": model,
        "layers": list(plan["settings"]["layers"]),
        "counts": {**counts, "prefixes": prefixes, "tokens_fed": tokens},
        "histogram_edges": bin_edges(),
        "position_edges": list(EDGES),
        "files": {name: {**asdict(facts), "made_with": made_with()} for name, facts in files.items()},
    }


@dataclass
class _Scan:
    """Scans every batch, in as many passes over the corpus as the budget of layers asks for."""

    model: MemoryModel
    recipe: Callable[[], ModelRecipe]
    settings: ScanSettings
    shapes: dict[int, LayerShape]
    shard: ShardNumber | None
    progress: Progress
    stopper: Stopper
    executor: Executor
    layer_budget: int | None
    parts: PartFolder
    save_seconds: float

    def _batches(self, window: Sequence[ScanSentence]) -> int:
        return len(plan_batches(window, self.settings, bos_to_feed(self.model, self.settings)))

    def _tokens(self, store: CorpusStore) -> int:
        """About how many are to be fed."""
        return int(store.counts["tokens"]) // (1 if self.shard is None else self.shard.of)

    def _job(
        self,
        layers: tuple[int, ...],
        ranges: Iterable[BatchRange],
        window: Callable[[int], Sequence[ScanSentence]],
        on_tokens: Callable[[int], None],
    ) -> ScanJob:
        return ScanJob(
            self.model, self.recipe, self.settings, layers, ranges, window, self.parts, on_tokens, self.stopper,
            self.save_seconds,
        )  # fmt: skip

    def run(self, store: CorpusStore) -> JoinedParts:
        """Scan what is not done of a text that is whole."""
        counts = store.batches(self._batches, self.stopper.check)
        self.parts.tidy(self.shapes, self.settings)
        before = JoinedParts([self.parts], self.shapes, self.settings)
        total = self._tokens(store)
        fed = before.tokens * len(self.shapes)  # tokens, once for each layer that has seen them
        self.progress("scan", before.tokens, total)
        for layers in _passes(before.layers_alike(), self.layer_budget):

            def on_tokens(tokens: int, layers: Sequence[int] = layers) -> None:
                nonlocal fed
                fed += tokens * len(layers)
                self.progress("scan", min(fed // len(self.shapes), total), total)

            left = ranges_left(counts, before.done(layers[0]), self.shard)
            for first in left:  # there is at least one: workers are worth starting
                self.executor.run(self._job(layers, chain([first], left), store.window, on_tokens))
        self.progress("scan", total, total)
        after = JoinedParts([self.parts], self.shapes, self.settings)
        for layer in self.shapes:
            if next(ranges_left(counts, after.done(layer), self.shard), None) is not None:
                raise AssertionError("an executor has left batches undone")
        return after


def _passes(alike: Sequence[tuple[int, ...]], budget: int | None) -> Iterator[tuple[int, ...]]:
    """Groups of layers that are scanned together; layers of a group have the same batches done."""
    for layers in alike:
        size = budget or len(layers)
        for first in range(0, len(layers), size):
            yield layers[first : first + size]
