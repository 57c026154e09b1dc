"""Building an index from a model and a corpus, in stages that can be interrupted at any time and resumed.

plan      partial/plan.json: model, corpus and settings of this scan
corpus    partial/corpus.parquet, and flat arrays of the encoded tokens
scan      partial/parts: states, saved at intervals and when the scan stops
tables    partial/*.parquet: triggers, memories, ordinary, vocabulary
publish   the tables move from partial/ into the index folder, and manifest.json is written last
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memlens import __version__
from memlens.corpus.sentences import corpus_fingerprint, corpus_stamps
from memlens.corpus.store import CorpusStore, store_corpus
from memlens.errors import SettingError
from memlens.files import FileFacts, explain_os_errors, lock_for_writing
from memlens.index import shards, staging
from memlens.index.format import (
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
from memlens.models.recipe import ModelRecipe, make_pool
from memlens.pool import Pool, RayPool, SerialPool
from memlens.progress import Progress, no_progress
from memlens.scanner.kernels import EDGES, bin_edges
from memlens.scanner.resources import check_list_memory
from memlens.scanner.scan import (
    SAVE_SECONDS,
    PartSaver,
    Scanner,
    bos_to_feed,
    plan_batches,
    planned_batches,
    scan_here,
    scan_on_pool,
    segment_size,
)
from memlens.scanner.state import LayerShape, PartFolder, ScanState, ShardNumber, remaining_ranges, shapes_of
from memlens.settings import WINDOW, CorpusSettings, RunSettings, ScanSettings, choose_layers
from memlens.signals import Stopper, stop_on_signal


def longest_sentence(model: MemoryModel, settings: ScanSettings) -> int | None:
    """Return the maximum number of tokens of a sentence, without BOS, or None if there is no limit.

    Raises:
        SettingError: The scan needs a BOS token that the model does not have or that `settings` turns off.
    """
    bos = bos_to_feed(model, settings)
    if settings.bos == "yes" and bos is None:
        raise SettingError(f"--bos is yes, but the tokenizer of {model.name} has no BOS token; use --bos auto or no")
    if bos is not None and bos >= model.vocabulary:
        raise SettingError(f"the BOS token is {bos}, but {model.name} has only {model.vocabulary} tokens; use --bos no")
    if settings.bos_prefix and bos is None:
        advice = "leave the preset out" if model.tokenizer.bos is None else "add --bos yes"
        raise SettingError(
            f"the preset needs BOS before each sentence, but {model.name} is scanned without it; {advice}"
        )
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
    """Return the plan of a scan as JSON: all facts that must be the same when the scan is resumed."""
    plan = {
        "schema": SCHEMA_VERSION,
        "model": model.fingerprint(),
        "corpus": corpus_fingerprint(corpus),
        "settings": {**settings.to_json(), "layers": list(layers)},
        "window": WINDOW,
    }
    return plan if shard is None else {**plan, "shard": str(shard)}


def build_index(
    model: MemoryModel,
    corpus: CorpusSettings,
    settings: ScanSettings,
    folder: Path,
    *,
    resume: bool = True,
    progress: Progress = no_progress,
    save_seconds: float = SAVE_SECONDS,
    run: RunSettings | None = None,
    workers: int = 1,
    shard: ShardNumber | None = None,
    layer_budget: int | None = None,
    device_map: Any = None,
    text_processes: int = 1,
) -> None:
    """Build an index in `folder`, or resume an interrupted build.

    Args:
        model: The model.
        corpus: The text.
        settings: Options that change the result.
        folder: The index folder.
        resume: Resume an unfinished scan, and keep a finished index.
        progress: Called with stage, work done and total.
        save_seconds: Minimum time between two saves of the state.
        run: Where workers run: on this machine or on a Ray cluster.
        workers: Number of workers; 1 means this process, 0 on a Ray cluster means as many as fit.
        shard: Scan only this shard. The folder then holds a shard for `merge_shards` instead of an index.
        layer_budget: Maximum number of layers per pass over the corpus.
        device_map: The device map that the model was loaded with.
        text_processes: Processes that tokenize a long text.
    """
    if layer_budget is not None and layer_budget < 1:
        raise SettingError(f"--layer-budget is {layer_budget}; it must be 1 or more")
    layers = layers_to_scan(model, settings)
    shapes = shapes_of(model, layers, settings)
    check_list_memory(shapes, settings, layer_budget)
    max_length = longest_sentence(model, settings)
    stamps = corpus_stamps(corpus)  # before the fingerprint, during which the files may change
    plan = make_plan(model, corpus, settings, layers, shard)
    staging.check_outside_corpus(folder, corpus.sources)
    if resume:
        staging.check_not_newer(folder)  # before the lock file is created
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        staging.check_only_index_files(folder)
    with lock_for_writing(folder / LOCK), stop_on_signal() as stopper:
        if resume and (staging.holds_index(folder, plan) or shards.holds_shard(folder, plan)):
            return
        with staging.discard_partial_on_error(folder):
            staging.prepare_partial(folder, plan, resume)
            if CorpusStore.exists(folder / PARTIAL):
                store = CorpusStore.verified(folder / PARTIAL)
            else:

                def on_bytes(read: int) -> None:
                    progress("corpus", read, None)
                    stopper.check()

                on_bytes(0)
                store = store_corpus(
                    folder / PARTIAL,
                    corpus,
                    model.tokenizer,
                    stamps=stamps,
                    vocabulary=model.vocabulary,
                    model_name=model.name,
                    max_length=max_length,
                    max_tokens=settings.max_tokens,
                    dedup=settings.dedup,
                    processes=text_processes,
                    on_bytes=on_bytes,
                    check_stop=stopper.check,
                )
        recipe = ModelRecipe(model, settings.threads, fingerprint=plan["model"], device_map=device_map)
        pool = make_pool(recipe, run or RunSettings(), workers, check_stop=stopper.check)
        scanned = _scan(
            model, store, settings, shapes, pool, PartFolder(folder / PARTIAL / PARTS),
            shard=shard, layer_budget=layer_budget, save_seconds=save_seconds, progress=progress, stopper=stopper,
        )  # fmt: skip
        progress("tables", 0, None)
        with explain_os_errors(folder):
            vocabulary = write_vocabulary(folder / PARTIAL, model.tokenizer, model.vocabulary)
            facts = model_facts(model, plan)
            if shard is None:
                made_by = staging.scanned_with(folder)
                publish(folder, scanned, store, vocabulary, facts, plan, made_by)
            else:
                shards.finish_shard(folder, facts, plan, shapes, store)


def publish(
    folder: Path,
    scanned: JoinedParts,
    store: CorpusStore,
    vocabulary: FileFacts,
    model: dict[str, Any],
    plan: dict[str, Any],
    scanned_with: Sequence[dict[str, str]],
) -> None:
    """Publish a finished scan in partial/ as an index."""
    files = {CORPUS: store.files[CORPUS], VOCABULARY: vocabulary, **write_scan_tables(folder / PARTIAL, scanned, store)}
    content = make_manifest(model, plan, store.counts, scanned.prefixes, scanned.tokens, files)
    manifest = Manifest({**content, "scanned_with": list(scanned_with)})
    staging.replace_tables(folder, folder / PARTIAL, files)
    manifest.write(folder)
    staging.remove_partial(folder)


def layers_to_scan(model: MemoryModel, settings: ScanSettings) -> tuple[int, ...]:
    """Return the requested layers, or all layers with memories if none were requested."""
    layers = choose_layers(settings.layers, len(model.layers))
    empty = [layer for layer in layers if not model.layers[layer].groups]
    if empty and settings.layers is not None:
        raise SettingError(f"layer {empty[0]} of {model.name} has no memories; leave it out of --layers")
    return tuple(layer for layer in layers if layer not in empty)


def model_facts(model: MemoryModel, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's description of the model."""
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
    """Return the content of the manifest."""
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


def _scan(
    model: MemoryModel,
    store: CorpusStore,
    settings: ScanSettings,
    shapes: dict[int, LayerShape],
    pool: Pool,
    parts: PartFolder,
    *,
    shard: ShardNumber | None,
    layer_budget: int | None,
    save_seconds: float,
    progress: Progress,
    stopper: Stopper,
) -> JoinedParts:
    """Scan the batches that no saved part contains. With a layer budget, pass over the corpus several times."""
    bos = bos_to_feed(model, settings)
    counts = store.batches(lambda number, window: len(plan_batches(number, window, settings, bos)), stopper.check)
    parts.check()
    before = JoinedParts([parts], shapes, settings)
    total = int(store.counts["tokens"]) // (1 if shard is None else shard.of)  # approximate for a shard
    fed = before.tokens * len(shapes)  # each token counts once per layer
    progress("scan", before.tokens, total)
    for layers in _split_passes(before.layers_alike(), layer_budget):
        ranges = list(remaining_ranges(counts, before.done(layers[0]), shard))
        if not ranges:
            continue

        def on_tokens(tokens: int, layers: Sequence[int] = layers) -> None:
            nonlocal fed
            fed += tokens * len(layers)
            progress("scan", min(fed // len(shapes), total), total)

        pass_shapes = {layer: shapes[layer] for layer in layers}
        state = ScanState.empty(pass_shapes, settings)
        name, saved = parts.open(layers)
        if saved is not None:
            state.restore_(saved)
        saver = PartSaver(parts, name, save_seconds)
        batches = planned_batches(ranges, store.window, settings, bos)
        if isinstance(pool, SerialPool):
            scan_here(Scanner(model, settings, state), batches, saver, on_tokens, stopper)
        else:
            on_gpus = model.device.type == "cuda" or (isinstance(pool, RayPool) and pool.gpus > 0)
            size = segment_size(model, settings, state, int(counts.sum()), on_gpus)
            scan_on_pool(pool, state, pass_shapes, settings, batches, size, saver, on_tokens)
    progress("scan", total, total)
    after = JoinedParts([parts], shapes, settings)
    assert not any(next(remaining_ranges(counts, after.done(layer), shard), None) for layer in shapes)
    return after


def _split_passes(alike: Sequence[tuple[int, ...]], budget: int | None) -> Iterator[tuple[int, ...]]:
    """Split groups of layers with the same completed batches into passes of at most `budget` layers."""
    for layers in alike:
        size = budget or len(layers)
        for first in range(0, len(layers), size):
            yield layers[first : first + size]
