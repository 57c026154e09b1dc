"""Every table of a scan equals a naive computation, one sentence at a time and without batches."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import memlens
from family_list import sweep_others
from memlens.models.groups import MemoryGroup
from memlens.models.hooks import on_input
from memlens.models.memory_model import MemoryModel
from memlens.testing import FAMILIES, MIXTURES, tiny_model, tiny_tokenizer

# Repeated sentences, repeated beginnings, a sentence that begins another, one-token sentences, one that is cut.
TEXT = """The river runs to the sea. The river runs to the hills. The river runs to the sea.
The river.
Rain fell on the hills, and the rivers rose. Rain fell on the city. The press was free in the city of Paris.
The river
In 1990 a café opened near the river; it was the first of its kind, and the people of the city read the news in it.
A
A
The end of the war came in the spring, as the papers of the day had said it would. The press was free.
The river. Rain.
"""
RTOL, ATOL = 1e-4, 1e-5
Scan = Callable[..., memlens.Index]


@cache
def the_model(family: str) -> MemoryModel:
    return memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=family in ("llama", "gemma2")))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def scan(corpus: Path, tmp_path: Path) -> Scan:
    return lambda family, **options: memlens.scan(the_model(family), corpus, out=tmp_path / "index", **options)


def sentences_of(index: memlens.Index) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in index.table("corpus").column("tokens").to_pylist())


@cache
def coefficients_one_by_one(family: str, sentences: tuple[tuple[int, ...], ...]) -> list[list[np.ndarray]]:
    """Return the coefficients [positions, memories] of each sentence and layer. Every sentence is run on its own."""
    model, found = the_model(family), []
    shift = 1 if model.tokenizer.adds_bos else 0
    for tokens in sentences:
        fed = [model.tokenizer.bos] * shift + list(tokens)
        with model.record(states=False) as recording:
            model.run_body(torch.tensor([fed]))
        found.append([recording.coefficients[layer][0, shift:].numpy() for layer in range(len(model.layers))])
    return found


@cache
def gates_one_by_one(family: str, sentences: tuple[tuple[int, ...], ...]) -> list[list[np.ndarray]]:
    """Return the gates x G^T + b in the same form, from the input and the weights of each group; 0 for plain groups."""
    model, found = the_model(family), []
    shift = 1 if model.tokenizer.adds_bos else 0
    for tokens in sentences:
        own = [np.zeros((len(tokens), block.memories), np.float32) for block in model.layers]

        def keep(states: torch.Tensor, layer: int, group: MemoryGroup, own: list[np.ndarray] = own) -> None:
            gates = torch.nn.functional.linear(states, group.keys, group.key_bias)
            own[layer][:, group.columns] = gates.reshape(-1, group.size)[shift:].detach().numpy()

        with ExitStack() as stack, torch.no_grad():
            for layer, block in enumerate(model.layers):
                for group in block.groups:
                    if group.gated:
                        stack.enter_context(on_input(group.reader, partial(keep, layer=layer, group=group)))
            model.run_body(torch.tensor([[model.tokenizer.bos] * shift + list(tokens)]))
        found.append(own)
    return found


def candidate_prefixes(sentences: tuple[tuple[int, ...], ...], dedup: str) -> list[tuple[int, int]]:
    seen: set[tuple[int, ...]] = set()
    chosen = []
    for s, tokens in enumerate(sentences):
        if dedup == "sentence" and tokens in seen:
            continue
        for p in range(len(tokens)):
            if dedup != "prefix" or tokens[: p + 1] not in seen:
                chosen.append((s, p))
        seen |= {tokens} if dedup == "sentence" else {tokens[: p + 1] for p in range(len(tokens))}
    return chosen


def naive_list(scores: dict[tuple[int, int], float], per_sentence: str, top: int) -> list[tuple[int, int]]:
    ordered = sorted((prefix for prefix in scores if scores[prefix] > 0), key=lambda x: (-scores[x], x))
    if per_sentence == "best":
        ordered = [x for i, x in enumerate(ordered) if x[0] not in {y[0] for y in ordered[:i]}]
    return ordered[:top]


def assert_same_but_for_ties(found: list[dict], expected: list[tuple[int, int]], scores: dict, sign: int) -> None:
    """Check that both lists hold the same prefixes. Only prefixes with equal coefficients may swap places."""
    assert len(found) == len(expected)
    assert len({(row["sentence"], row["position"]) for row in found}) == len(found)
    for rank, (row, prefix) in enumerate(zip(found, expected, strict=True)):
        assert row["rank"] == rank
        here = (row["sentence"], row["position"])
        np.testing.assert_allclose(sign * row["coefficient"], scores[here], rtol=RTOL, atol=ATOL)
        if here != prefix:
            np.testing.assert_allclose(scores[here], scores[prefix], rtol=RTOL, atol=ATOL)


def reaching(index, layer: int, memory: int, coefficients: list, prefixes: list[tuple[int, int]]) -> list:
    """Return the prefixes that reach a memory. They reach an expert if one of its coefficients is not zero."""
    name = index.names.name(layer, memory)
    if name.kind != "routed":
        return prefixes
    span = index.names.span(name.owner)
    return [(s, p) for s, p in prefixes if coefficients[s][layer][p, span.start : span.stop].any()]


def check_index(index: memlens.Index, family: str, per_sentence: str, dedup: str, top: int) -> None:
    sentences = sentences_of(index)
    coefficients = coefficients_one_by_one(family, sentences)
    prefixes = candidate_prefixes(sentences, dedup)
    rows: dict[tuple[int, int, str], list[dict]] = {}
    for row in index.table("triggers").to_pylist():
        rows.setdefault((row["layer"], row["memory"], row["end"]), []).append(row)
        following = sentences[row["sentence"]][row["position"] + 1 :]
        assert row["next_token"] == (following[0] if following else None)
    facts = {(row["layer"], row["memory"]): row for row in index.table("memories").to_pylist()}
    ends = {"top": 1, "bottom": -1} if index.manifest.model.gated else {"top": 1}
    for layer, block in enumerate(the_model(family).layers):
        for memory in range(block.memories):
            own = reaching(index, layer, memory, coefficients, prefixes)
            m = np.array([coefficients[s][layer][p, memory] for s, p in own])
            for end, sign in ends.items():
                scores = dict(zip(own, (sign * m).tolist(), strict=True))
                expected = naive_list(scores, per_sentence, top)
                assert_same_but_for_ties(rows.get((layer, memory, end), []), expected, scores, sign)
            row = facts[layer, memory]
            if not own:
                assert (row["max"], row["min"], row["mean"], row["frequency"], row["dead"]) == (0, 0, 0, 0, False)
                continue
            np.testing.assert_allclose([row["max"], row["min"], row["mean"]], [m.max(), m.min(), m.mean()], RTOL, 1e-5)
            assert abs(row["frequency"] * len(m) - (m > 0).sum()) <= (np.abs(m) < ATOL).sum() + 1e-6
            assert row["dead"] == all((layer, memory, end) not in rows for end in ends)
    assert index.manifest.counts.prefixes == len(prefixes)


def check_counts(index: memlens.Index, family: str, per_sentence: str, dedup: str) -> None:
    """Check counts.parquet and quadrants.parquet, memory by memory and prefix by prefix."""
    sentences = sentences_of(index)
    coefficients, gates = coefficients_one_by_one(family, sentences), gates_one_by_one(family, sentences)
    prefixes = candidate_prefixes(sentences, dedup)
    lists: dict[tuple[int, int, str], list[dict]] = {}
    for row in index.table("quadrants").to_pylist() if index.has("quadrants") else []:
        lists.setdefault((row["layer"], row["memory"], row["quadrant"]), []).append(row)
    edges = index.manifest.position_edges
    for row in index.table("counts").to_pylist():
        layer, memory = row["layer"], row["memory"]
        group, _ = the_model(family).layers[layer].group_of(memory)
        own = reaching(index, layer, memory, coefficients, prefixes)
        m = {(s, p): coefficients[s][layer][p, memory] for s, p in own}
        bucket = {prefix: sum(prefix[1] >= edge for edge in edges) for prefix in own}
        for b in range(len(edges) + 1):
            inside = [prefix for prefix in own if bucket[prefix] == b]
            assert row["prefixes"][b] == len(inside)
            assert row["sentences"][b] == len({s for s, _ in inside})
            unsure = sum(abs(m[prefix]) < ATOL for prefix in inside)
            assert abs(row["fired"][b] - sum(m[prefix] > 0 for prefix in inside)) <= unsure
        if not group.gated:
            continue
        for number, quadrant in enumerate(("++", "+-", "-+", "--")):
            sign = 1 if quadrant in ("++", "--") else -1  # of the coefficient: every gated family here has SiLU or GELU
            scores = {
                (s, p): sign * m[s, p] for s, p in own if (gates[s][layer][p, memory] > 0) == (quadrant[0] == "+")
            }
            unsure = sum(abs(x) < ATOL for x in m.values())
            assert abs(row["quadrants"][number] - sum(x > 0 for x in scores.values())) <= unsure
            expected = naive_list(scores, per_sentence, 5)
            found = lists.get((layer, memory, quadrant), [])
            if not unsure:
                assert_same_but_for_ties(found, expected, scores, sign)
    assert bool(lists) == any(layer.gated for layer in the_model(family).layers)


EVERY_FAMILY = sweep_others((family, "best", "prefix", 4, 100) for family in FAMILIES + MIXTURES)
BY_DEFAULT = (("llama", "all", "prefix"), ("llama", "best", "sentence"), ("llama", "all", "none"))
EVERY_CHOICE = [
    pytest.param(*choice, 6, 64, marks=() if choice in BY_DEFAULT else pytest.mark.sweep)
    for choice in product(
        ("gpt2", "llama", "gpt_neox", "gemma2", "qwen2_moe"), ("best", "all"), ("prefix", "sentence", "none")
    )
]


@pytest.mark.parametrize(("family", "per_sentence", "dedup", "top", "batch_tokens"), [*EVERY_FAMILY, *EVERY_CHOICE])
def test_the_index_equals_brute_force(family, per_sentence, dedup, top, batch_tokens, scan) -> None:
    index = scan(family, top=top, batch_tokens=batch_tokens, per_sentence=per_sentence, dedup=dedup)
    check_index(index, family, per_sentence, dedup, top)
    check_counts(index, family, per_sentence, dedup)


def test_bottom_triggers_of_a_plain_block_are_kept_on_request(scan: Scan) -> None:
    rows = scan("gpt2", top=3, bottom="yes").table("triggers").to_pylist()
    assert {row["end"] for row in rows} == {"top", "bottom"}
    assert all(row["coefficient"] < 0 for row in rows if row["end"] == "bottom")


def test_the_released_preset_takes_bos_alone_and_leaves_out_the_whole_sentence(scan: Scan) -> None:
    index = scan("llama", preset="released", top=100)
    lengths = [len(tokens) for tokens in sentences_of(index)]
    rows = index.table("triggers").to_pylist()
    assert min(row["position"] for row in rows) == -1
    assert all(row["position"] < lengths[row["sentence"]] - 1 for row in rows)
    assert index.manifest.counts.prefixes == sum(lengths)


def test_ordinary_examples_fire_and_are_no_triggers(scan: Scan) -> None:
    index = scan("gpt2", top=2, sample_every=1, dedup="none")
    coefficients = coefficients_one_by_one("gpt2", sentences_of(index))
    triggers = {(r["layer"], r["memory"], r["sentence"], r["position"]) for r in index.table("triggers").to_pylist()}
    rows = index.table("ordinary").to_pylist()
    assert len(rows) > 300
    for row in rows:
        exact = coefficients[row["sentence"]][row["layer"]][row["position"], row["memory"]]
        np.testing.assert_allclose(row["coefficient"], exact, rtol=RTOL, atol=ATOL)
        assert row["coefficient"] > 0
        assert (row["layer"], row["memory"], row["sentence"], row["position"]) not in triggers


def test_the_histogram_of_a_full_sample_counts_every_prefix_in_its_bin(scan: Scan) -> None:
    index = scan("llama", top=2, sample_every=1, dedup="none")
    one_by_one = coefficients_one_by_one("llama", sentences_of(index))
    coefficients = np.concatenate([np.stack(layers) for layers in one_by_one], axis=1)  # [layers, n, memories]
    edges = np.array(index.manifest.histogram_edges)
    compared = 0
    for row in index.table("memories").to_pylist()[::7]:
        m = coefficients[row["layer"], :, row["memory"]]
        if np.min(np.abs(m[:, None] / edges[None, :] - 1)) < 1e-3:
            continue  # too near an edge for rounding to decide
        expected = np.bincount(np.searchsorted(edges, m), minlength=len(edges) + 1)
        assert row["histogram"] == expected.tolist()
        compared += 1
    assert compared > 0
