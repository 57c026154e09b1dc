"""The paper's kind of model: whole words, an adaptive softmax, and what may be called a logit there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.tracer.intervene import apply_edits
from memlens.tracer.intervention import Intervention
from memlens.tracer.prompt import read_prompt
from memlens.tracer.trace import trace
from memlens.tracer.value_changes import ValueChange, token_direction, trying

PROMPT = "the city of"
FIXTURE = Path(__file__).parents[1] / "golden" / "fixture"


@pytest.fixture(scope="module")
def words() -> MemoryModel:
    return memlens.load(FIXTURE)


def softmax_of(model: MemoryModel) -> Any:
    return model.network.output


def normalisers(model: MemoryModel, state: torch.Tensor, word: int) -> float:
    """log of what the word's score is divided by: the head's sum and, for a rarer word, its band's as well."""
    softmax = softmax_of(model)
    total = float((torch.cat([softmax.words, softmax.classes]) @ state).logsumexp(0))
    for band, tail in enumerate(softmax.tails):
        if softmax.ends[band] <= word < softmax.ends[band + 1]:
            total += float((tail.words @ (tail.projection.T @ state)).logsumexp(0))
    return total


def some_words(model: MemoryModel) -> list[int]:
    """One word of each band, and the last of all."""
    starts = [0, *softmax_of(model).ends]
    return [*(start + 5 for start in starts[:-1]), starts[-1] - 1]


def test_the_logit_of_a_word_of_any_band_is_log_p_but_for_the_normalisers(words: MemoryModel) -> None:
    state = words.run_body(torch.tensor([[words.tokenizer.bos, *words.tokenizer.encode([PROMPT])[0].ids]]))[0, -1]
    assert len(softmax_of(words).ends) > 1
    with torch.no_grad():
        for word in some_words(words):
            found = trace(words, PROMPT, token=word)
            log_p = float(words.lens.state_logits(state)[word])
            assert found.logit == pytest.approx(log_p + normalisers(words, state, word), abs=1e-3)
            assert found.logit == pytest.approx(sum(found.parts.values()), abs=1e-12)
            assert found.token.p == pytest.approx(float(torch.tensor(log_p).exp()), rel=1e-3)


def test_a_trace_says_what_its_logit_is(words: MemoryModel, family: Callable[..., MemoryModel]) -> None:
    assert "its band's class" in trace(words, PROMPT).to_json()["logit_is"]
    assert trace(family("gpt2"), PROMPT).to_json()["logit_is"] == "the model's own logit"
    assert "before it is soft-capped" in trace(family("gemma2"), PROMPT)._repr_html_()


def test_a_rare_words_direction_leads_to_its_band_as_well(words: MemoryModel) -> None:
    softmax = softmax_of(words)
    word = softmax.ends[0] + 5
    own = softmax.tails[0].words[5] @ softmax.tails[0].projection.T + softmax.classes[0]
    assert torch.allclose(token_direction(words, 1, word), own / own.norm(), atol=1e-6)
    top = trace(words, PROMPT, token=word).layers[-1].by_size[0].memory
    change = ValueChange.towards(words, top, word, 20.0)
    before = trace(words, PROMPT, token=word)
    with trying(words, change):
        assert trace(words, PROMPT, token=word).token.p > before.token.p


def test_effects_on_a_word_of_any_band_can_be_integrated(words: MemoryModel) -> None:
    for word in some_words(words):
        found = memlens.integrate(words, PROMPT, layers=[3], token=word)
        exact = memlens.silence_each(words, PROMPT, [memory for memory, _ in found.strongest(3)], token=word)
        assert abs(found.gap) < 1e-5 and found.p == pytest.approx(exact.p, rel=1e-5)
        first, effect = found.strongest(1)[0]
        assert effect * exact.effects[first] > 0


def test_the_text_up_to_a_position_has_its_spaces(words: MemoryModel) -> None:
    assert [trace(words, PROMPT, position=at).text for at in range(3)] == ["the", "the city", "the city of"]
    found = trace(words, "the  city\nof", position=1)
    assert found.text == "the  city" and "the  city" in found._repr_html_() and "'the  city'" in repr(found)


def test_interventions_on_words_do_what_algebra_says(words: MemoryModel) -> None:
    prompt = read_prompt(words, PROMPT)
    own = words.logits(prompt.fed())
    with apply_edits(words, Intervention.parse("L0=x1", "L3=x1", "L2N7=x1"), prompt):
        assert torch.equal(words.logits(prompt.fed()), own)
    with apply_edits(words, Intervention.parse("L1=0"), prompt), words.record() as recording:
        words.run_body(prompt.fed())
    bias = words.layers[1].value_bias
    assert bias is not None and torch.equal(recording.y[1], bias.expand_as(recording.y[1]))
