"""Patterns as detectors on other text, against plain reading, plain counting and single runs of the model."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import Planted, read_lexicon

import memlens
from index_by_hand import pieces
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.testing import tiny_model, tiny_tokenizer

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "detectors.py"
spec = importlib.util.spec_from_file_location("detectors", PROGRAM)
assert spec is not None and spec.loader is not None
detectors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(detectors)
TEXT = "The river runs to the sea. Rain fell on the hills. The press was free in the city of Paris, by the river."
READABLE = re.compile(r"(ending|n-gram):[a-z ]+|shape:(year|-[a-z]+)")


def has_pattern(name: str, text: str) -> bool:
    """Read the prefix as a person would."""
    kind, _, what = name.partition(":")
    words, last = re.findall(r"\w+|[^\w\s]", text.lower()), text.split()[-1]
    if kind == "ending":
        return words[-len(what.split()) :] == what.split()
    if kind == "n-gram":
        return f" {what} " in f" {' '.join(words)} "
    if what == "year":
        return re.fullmatch(r"1[0-9]{3}|20[0-9]{2}", last) is not None
    return words[-1].isalpha() and words[-1].endswith(what[1:]) and len(words[-1]) > len(what[1:])


def test_the_score_is_the_largest_confidence_of_the_patterns_that_a_reader_finds(
    planted: tuple[Index, Planted],
) -> None:
    index, _ = planted
    memories = [MemoryId(memory // 20, memory % 20) for memory in range(24)]
    rows = index.rows_of("patterns", memories, "pattern, confidence")
    memories = [memory for memory in memories if all(READABLE.fullmatch(row["pattern"]) for row in rows[memory])]
    places = detectors.all_prefixes(index, 3000)
    texts = index.sentences(sorted({*places.sentences.tolist()}))
    scores = detectors.score_prefixes(index, index, places, memories)
    assert len(memories) >= 8 and (scores > 0).any(1).sum() >= 8
    for column, (sentence, position) in enumerate(zip(*places, strict=True)):
        prefix = "".join(pieces(texts[sentence]["text"])[: position + 1])
        for number, memory in enumerate(memories):
            held = [row["confidence"] for row in rows[memory] if has_pattern(row["pattern"], prefix)]
            assert scores[number, column] == np.float32(max(held, default=0.0)), (prefix, rows[memory])


def test_a_topic_selects_prefixes_with_its_words(
    planted: tuple[Index, Planted], request: pytest.FixtureRequest
) -> None:
    index, _ = planted
    words = read_lexicon(request.node.callspec.params["planted"])
    places = detectors.all_prefixes(index, 4000)
    texts = index.sentences(sorted({*places.sentences.tolist()}))
    prefixes = ["".join(pieces(texts[s]["text"])[: p + 1]) for s, p in zip(*places, strict=True)]
    for number, topic in enumerate(list(words.TOPICS)[:6], 24):
        about = [len(set(re.findall(r"\w+", text)) & set(words.TOPICS[topic])) for text in prefixes]
        (scores,) = detectors.score_prefixes(index, index, places, [MemoryId(number // 20, number % 20)])
        several, none = np.array(about) >= 3, np.array(about) == 0
        assert (scores[several] > 0).mean() > 0.7 and (scores[none] > 0).mean() < 0.15


def test_scores_are_those_of_counting() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        scores = random.choice([0.0, 0.0, 0.3, 0.8], 311).astype(np.float32)
        coefficients = np.maximum(random.normal(size=311) + scores - 1, 0).astype(np.float32)
        bar = sorted(coefficients.tolist())[-round(detectors.STRONG * 311)]
        strong = [m >= bar and m > 0 for m in coefficients]
        hits = sum(is_strong and score > 0 for is_strong, score in zip(strong, scores, strict=True))
        precision, recall = hits / sum(scores > 0), hits / sum(strong)
        pairs = [
            (scores[i] > scores[j]) + (scores[i] == scores[j]) / 2
            for i in range(311) for j in range(311) if strong[i] and not strong[j]
        ]  # fmt: skip
        found = detectors.score_detector(scores, coefficients)
        assert found[:2] == pytest.approx((precision, recall))
        assert found.f1 == pytest.approx(2 * precision * recall / (precision + recall) if hits else 0)
        assert found.auroc == pytest.approx(np.mean(pairs))
        assert found.correlation == pytest.approx(np.corrcoef(scores, coefficients)[0, 1], rel=1e-5)


def test_a_memory_that_is_never_active_has_no_area() -> None:
    found = detectors.score_detector(np.array([0.5, 0, 0]), np.zeros(3))
    assert found == (0, 0, 0, None, 0)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_coefficients_are_those_of_each_sentence_alone(tmp_path: Path, family: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer())
    index = memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=3)
    memories = [index.names.name(layer, number) for layer in index.layers for number in (5, 0, 3)]
    places = detectors.all_prefixes(index, 30)
    read = detectors.read_all_coefficients(index, model, places, memories)
    bos = [] if index.manifest.model.bos is None else [index.manifest.model.bos]
    for sentence in sorted({*places.sentences.tolist()}):
        tokens = [*bos, *index.sentences([sentence])[sentence]["tokens"]]
        blocks: list = []
        with torch.no_grad(), model.watch(lambda layer, block, blocks=blocks: blocks.append((layer, block))):
            model.run_body(torch.tensor([tokens]))
        for row, memory in enumerate(memories):
            number, alone = index.names.number(memory), np.zeros(len(tokens) - len(bos))
            for layer, block in blocks:
                columns = block.group.columns
                if layer == memory.layer and columns.start <= number < columns.stop:
                    alone += block.everywhere()[0, len(bos) :, number - columns.start].numpy()
            assert read[row, places.sentences == sentence] == pytest.approx(alone, abs=1e-5)
    assert len(places.sentences) >= 30 and isinstance(places, detectors.Places)
