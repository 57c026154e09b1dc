"""The bundled model has the intended shape and has learned its language."""

import math
from collections import Counter
from importlib.resources import files
from itertools import islice

import pytest
import torch

import memlens
from memlens.corpus.sentences import read_units
from memlens.models.memory_model import MemoryModel
from memlens.settings import CorpusSettings

FOLDER = files("memlens") / "bundled" / "model"


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return memlens.load("bundled")


def test_it_is_a_small_version_of_the_papers_model_with_plain_weights(model: MemoryModel) -> None:
    assert len(model.layers) == 16 and {layer.memories for layer in model.layers} == {512}
    assert {(layer.activation, layer.gated) for layer in model.layers} == {("relu", False)}
    assert (model.width, model.vocabulary) == (160, 8189)
    weights = (FOLDER / "model.safetensors").stat()
    assert weights.st_size <= 12_000_000 and weights.st_mode & 0o444 == 0o444
    assert not [path.name for path in FOLDER.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


def test_it_predicts_held_out_text_better_than_frequencies(model: MemoryModel) -> None:
    """The frequencies come from the predicted text itself, which is an advantage."""
    texts = [unit.text for unit in islice(read_units(CorpusSettings(("bundled:prose",))), 0, None, 20)]
    sentences = [encoded.ids for encoded in model.tokenizer.encode(texts)]
    counts = Counter(token for sentence in sentences for token in sentence)
    total = sum(counts.values())
    by_frequency = -sum(count * math.log(count / total) for count in counts.values()) / total
    loss = 0.0
    for sentence in sentences:
        tokens = torch.tensor([[model.tokenizer.bos, *sentence]])
        with torch.no_grad():
            scores = model.network(tokens).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(scores, tokens[0, 1:], reduction="sum"))
    assert len(sentences) >= 150 and loss / total < by_frequency - 0.25
