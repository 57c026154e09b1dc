"""Subjects by the model's states, against naive loops, and with states that are planted."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import memlens
from index_by_hand import write_index
from memlens.index.reader import Index
from memlens.pattern import states
from memlens.pattern.states import StateCoherence, find_state_subjects, read_states
from memlens.pattern.table import compute_patterns
from memlens.settings import PatternSettings
from memlens.testing import tiny_model, tiny_tokenizer

TEXT = "The river runs to the sea. Rain fell on the hills of the city. The press was free in the city of Paris."


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, Any]:
    folder = tmp_path_factory.mktemp("states")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    return memlens.scan(model, folder / "text.txt", out=folder / "index", top=8), model


def test_states_are_those_of_running_each_prefix_alone(scanned: tuple[Index, Any]) -> None:
    index, model = scanned
    places = [(row["sentence"], p) for row in index.table("corpus").to_pylist() for p in range(len(row["tokens"]))]
    sentences, positions = (np.array(column, np.int64) for column in zip(*places[::-1], strict=True))
    ends = read_states(index, model, sentences, positions)
    bos = [] if index.manifest.model.bos is None else [index.manifest.model.bos]
    for row, (s, p) in enumerate(places[::-1]):
        tokens = index.sentences([s])[s]["tokens"][: p + 1]
        with torch.no_grad():
            alone = model.run_body(torch.tensor([[*bos, *tokens]]))[0, -1]
        assert torch.allclose(ends.of([row])[0], alone, rtol=2e-3, atol=2e-3 * float(alone.abs().max()))
    assert ends.there.all() and ends.tokens == sum(len(row["tokens"]) for row in index.table("corpus").to_pylist())


def test_the_pass_stops_at_its_limit_of_tokens(scanned: tuple[Index, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_RANDOM", 1)
    sentences, positions = np.array([0, 1, 1, 2]), np.array([5, 2, 3, 0])
    ends = read_states(*scanned, sentences, positions, most_tokens=5)
    assert ends.there.tolist() == [False, True, True, True] and ends.tokens == 5


def test_coherence_is_the_sum_over_pairs_with_different_last_tokens() -> None:
    random = np.random.default_rng(0)
    unit = torch.nn.functional.normalize(torch.tensor(random.normal(size=(40, 6))), dim=1).half()
    tokens = random.integers(0, 5, 40).astype(np.int32)
    rows = random.integers(-1, 40, (50, 7))
    sums, pairs = StateCoherence(unit, tokens).sums(rows)
    for own, total, count in zip(rows.tolist(), sums, pairs, strict=True):
        both = [(a, b) for a, b in combinations(own, 2) if min(a, b) >= 0 and a != b and tokens[a] != tokens[b]]
        assert count == len(both)
        assert total == pytest.approx(sum(float(unit[a].float() @ unit[b].float()) for a, b in both), abs=1e-4)


def test_z_of_random_sets_is_standard() -> None:
    random = np.random.default_rng(1)
    unit = torch.nn.functional.normalize(torch.tensor(random.normal(size=(3000, 30))), dim=1).half()
    coherence = StateCoherence.calibrate(unit, np.arange(3000, dtype=np.int32), np.arange(1000), random)
    z = coherence.z_scores(random.integers(1000, 3000, (2000, 12)))
    assert abs(z.mean()) < 0.1 and 0.9 < z.std() < 1.1
    assert np.isnan(coherence.z_scores(np.full((1, 12), -1))).all()


ENDINGS, SUBJECTS, WIDTH = 12, 6, 16


class PlantedModel:
    """A model whose state holds the last token, and the subject of the sentence where a word of it was read.

    It expects token s after a prefix of a sentence about subject s.
    """

    width, device, dtype = WIDTH + SUBJECTS, torch.device("cpu"), torch.float32

    def __init__(self, vocabulary: list[str]) -> None:
        marks = [int(text.strip()[4:]) if text.strip().startswith("mark") else -1 for text in vocabulary]
        self.marks = torch.tensor(marks)
        self.embedding = torch.randn(len(vocabulary), WIDTH, generator=torch.Generator().manual_seed(3))
        self.lens = SimpleNamespace(
            final_norm=None,
            state_logits=lambda states: 4 * torch.nn.functional.pad(states[:, WIDTH:], (0, len(vocabulary) - SUBJECTS)),
            probabilities=lambda logits: logits.softmax(-1),
        )

    def run_body(self, tokens: torch.Tensor) -> torch.Tensor:
        subject = torch.nn.functional.one_hot(self.marks[tokens] + 1, SUBJECTS + 1)[..., 1:].cumsum(1).clamp(max=1)
        return torch.cat([self.embedding[tokens], 4.0 * subject], -1)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Index, PlantedModel]]:
    """L0: 40 memories with a subject; L1: 200 with random triggers; L2: 200 with triggers that share last tokens."""
    draw = np.random.default_rng(7)
    texts, about = [], []
    for _ in range(3000):
        subject = int(draw.integers(-SUBJECTS, SUBJECTS))
        mark = f"mark{subject}" if subject >= 0 else "plain"
        words = [*(f"w{n}" for n in draw.integers(0, 40, 3)), mark, f"w{draw.integers(0, 40)}"]
        texts.append(" ".join([*words, f"end{draw.integers(0, ENDINGS)}", "stop"]))
        about.append(subject)
    ending = np.array([int(text.split()[5][3:]) for text in texts])
    triggers = {}
    for layer, count in enumerate((40, 200, 200)):
        for memory in range(count):
            sentences = draw.permutation(len(texts))
            if layer == 0:
                sentences = [s for s in sentences if about[s] == memory % SUBJECTS]
            if layer == 2:
                sentences = [s for s in sentences if ending[s] in (memory % ENDINGS, (memory + 5) % ENDINGS)]
            triggers[layer, memory] = [(int(s), 5) for s in sentences[:50]]
    index = write_index(tmp_path_factory.mktemp("planted-states") / "index", texts, triggers)
    yield index, PlantedModel(index.vocabulary)


def test_planted_subjects_are_found_and_fakes_are_not(planted: tuple[Index, Any]) -> None:
    index, model = planted
    found = find_state_subjects(index, model, PatternSettings(background=1000))
    layers = np.repeat([0, 1, 2], [40, 200, 200])
    shares = [np.mean([m in found.by_memory for m in np.flatnonzero(layers == layer)]) for layer in range(3)]
    assert shares[0] >= 0.9 and max(shares[1:]) <= 0.02, shares
    assert found.notes["swapped"] <= 0.02 and found.notes["subjects"] == len(found.by_memory)
    for m, subject in found.by_memory.items():
        if m < 40:
            assert subject.expects[0] == m % SUBJECTS  # the token that the model expects
            assert subject.members.bit_count() >= 20 and subject.net >= 4
            assert subject.scores.auroc is not None and subject.scores.auroc > 0.9


def test_a_subject_becomes_a_pattern_and_a_name(planted: tuple[Index, Any], tmp_path: Path) -> None:
    index, model = planted
    compute_patterns(index, PatternSettings(background=1000), model=model)
    rows = index.sql("SELECT memory, description, auroc FROM {patterns} WHERE starts_with(pattern, 'subject:')")
    assert len({row["memory"] for row in rows}) >= 36
    expected = {memory: index.vocabulary[memory % SUBJECTS].strip() for memory in range(40)}
    assert all(row["description"].startswith(f"expects {expected[row['memory']]}") for row in rows)
    names = index.sql("SELECT memory, name FROM {names} WHERE layer = 0")
    assert sum("expects " in row["name"] for row in names) >= 36
    assert index.manifest.content["patterns"]["states"]["tested"] > 300
