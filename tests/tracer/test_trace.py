"""A trace agrees with the model: parts add up, tops and cases are the model's own, no hook stays behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memlens
from index_by_hand import complete_table
from memlens.errors import MemlensError, ModelError
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.pattern.table import PATTERNS_SCHEMA
from memlens.testing import FAMILIES, tiny_model, tiny_tokenizer
from memlens.tracer.trace import trace
from memlens.tracer.value_changes import ValueChange, token_direction, trying
from memlens.vocab.table import compute_values

PROMPT = "The river runs to the sea"
Family = Callable[..., MemoryModel]
Indexed = tuple[memlens.Index, MemoryModel]


def fed(model: MemoryModel, text: str = PROMPT) -> torch.Tensor:
    ids = model.tokenizer.encode([text])[0].ids
    return torch.tensor([[model.tokenizer.bos, *ids] if model.tokenizer.adds_bos else ids])


def own_logits(model: MemoryModel, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own last logits [vocabulary], before the cap."""
    own = model.logits(tokens)[0, -1]
    cap = model.lens.soft_cap
    return own if cap is None else torch.atanh(own.double() / cap) * cap


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_add_up_to_the_models_own_logit(name: str, family: Family) -> None:
    model = family(name)
    own = own_logits(model, fed(model))
    found = trace(model, PROMPT)
    assert found.prediction.id == found.token.id == int(own.argmax()) and found.rank == 1
    # a capped logit says little about itself near the cap, so a token in the middle is taken as well
    middle = int(own.abs().argmin())
    for one, token in ((found, found.token.id), (trace(model, PROMPT, token=middle), middle)):
        if model.lens.soft_cap is None or token == middle:
            assert one.logit == pytest.approx(float(own[token]), abs=1e-4)
        assert one.logit == pytest.approx(sum(one.parts.values()), abs=1e-12)
        assert one.token.p == pytest.approx(float(torch.softmax(model.logits(fed(model))[0, -1], 0)[token]), rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "opt"])
def test_all_memories_listed_add_up_to_what_the_layer_says_they_added(name: str, family: Family) -> None:
    for layer in trace(family(name), PROMPT, top=40).layers:
        assert sum(memory.effect for memory in layer.by_effect) == pytest.approx(layer.memories, abs=1e-4)
        assert [abs(one.effect) for one in layer.by_effect] == sorted(abs(x.effect) for x in layer.by_effect)[::-1]
        assert [one.size for one in layer.by_size] == sorted((one.size for one in layer.by_size), reverse=True)


def test_an_effect_is_what_the_frozen_logit_loses_without_the_memory(family: Family) -> None:
    model = family("gpt2")
    found = trace(model, PROMPT)
    with model.record() as recording:
        model.run_body(fed(model))
    norm = model.lens.final_norm
    assert norm is not None and norm.gain is not None
    scale = torch.sqrt(recording.o[2][0, -1].var(correction=0) + norm.epsilon)
    for memory in (layer.by_effect[0] for layer in found.layers):
        value = model.layers[memory.memory.layer].values[memory.memory.memory]
        m = recording.coefficients[memory.memory.layer][0, -1, memory.memory.memory]
        expected = (m * (value - value.mean()) * norm.gain / scale) @ model.lens.embedding[found.token.id]
        assert memory.effect == pytest.approx(float(expected), abs=1e-5)
        assert memory.coefficient == pytest.approx(float(m))
        assert memory.size == pytest.approx(float(abs(m) * value.norm()), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma2"])
def test_tokens_probabilities_cases_and_settling_are_those_of_the_states(name: str, family: Family) -> None:
    model = family(name)
    found = trace(model, PROMPT, top=4)
    with model.record() as recording:
        model.run_body(fed(model))
    tops = []
    for layer in found.layers:
        residual, added, output = (store[layer.layer][0, -1] for store in (recording.r, recording.y, recording.o))
        norm = model.lens.final_norm
        assert norm is not None and norm.gain is not None
        p = [model.lens.probabilities(model.lens.state_logits(state)) for state in (residual, output)]
        added = (added - added.mean() * norm.centers) * norm.gain  # as a value is read
        p.insert(1, torch.softmax(added @ model.lens.embedding.T, 0))
        for shares, expected in zip((layer.residual, layer.ffn, layer.output), p, strict=True):
            assert [share.id for share in shares] == expected.topk(4).indices.tolist()
            assert [share.p for share in shares] == pytest.approx(expected.topk(4).values.tolist(), rel=1e-4)
            assert all(share.text == model.tokenizer.token_text(share.id) for share in shares)
        assert layer.p == pytest.approx(float(p[2][found.token.id]), rel=1e-4)
        r, y, o = (int(one.argmax()) for one in p)
        if o == r:
            case = "agreement" if o == y else "residual"
        elif o == y:
            case = "ffn"
        else:
            case = "reversal" if r == y else "composition"
        assert layer.case == case
        tops.append(o)
    assert found.settled == min(layer for layer in range(3) if set(tops[layer:]) == {tops[-1]})


def test_a_negative_coefficient_swaps_what_is_promoted_and_demoted(family: Family) -> None:
    model = family("llama")
    memories = [memory for layer in trace(model, PROMPT, top=40).layers for memory in layer.by_effect]
    assert {memory.coefficient > 0 for memory in memories} == {True, False}
    for one in memories:
        value = model.layers[one.memory.layer].values[one.memory.memory][None]
        scores = model.lens.value_scores(value, one.memory.layer)[0] * (1 if one.coefficient > 0 else -1)
        assert one.promotes[0].id == int(scores.argmax()) and one.demotes[0].id == int(scores.argmin())


def test_a_position_is_traced_as_if_the_prompt_ended_there(family: Family) -> None:
    for adds_bos in (False, True):
        model = family("gpt2", adds_bos)
        ids = model.tokenizer.encode([PROMPT])[0].ids
        found = trace(model, PROMPT, position=2)
        assert found.position == 2 and [token.id for token in found.prefix] == ids[:3]
        own = model.logits(fed(model)[:, : 3 + adds_bos])[0, -1]
        assert found.logit == pytest.approx(float(own.max()), abs=1e-4)
        assert trace(model, PROMPT, position=2 - len(ids)) == found


def test_one_forward_pass_is_all_it_takes(model: MemoryModel) -> None:
    passes = []
    with model.watch(lambda layer, m: passes.append(layer)):
        trace(model, PROMPT)
    assert passes == [0, 1, 2]


def hooks_of(model: MemoryModel) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.network.modules() for kind in kinds)


def test_runs_that_fail_midway_leave_the_hooks_as_they_were(model: MemoryModel) -> None:
    last = model.network.transformer.h[2]
    last.register_forward_hook(lambda *_: None)  # somebody's own
    own, calls = last.forward, 0

    def fail_at_times(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise RuntimeError("out of memory, say")
        return own(*arguments, **named)

    last.forward = fail_at_times
    before, failed = hooks_of(model), 0
    tries: list[Callable[[], object]] = [
        lambda: trace(model, "The", top=1),
        lambda: trace(model, "The", token=4000),
        lambda: memlens.intervene(model, "The", "L1N3=4", top=1),
        lambda: memlens.generate(model, "The", 3, "L1N3=4"),
        lambda: memlens.silence_each(model, "The", ["L1N3", "L0N0"]),
        lambda: memlens.integrate(model, "The", layers=[1], steps=2),
        lambda: memlens.side_effects(model, [], "The"),
    ]
    for number in range(70):
        try:
            tries[number % 7]()
        except (RuntimeError, MemlensError):
            failed += 1
    assert failed >= 40 and hooks_of(model) == before == 1
    last.forward = own
    assert memlens.intervene(model, "The", "L1N3=x1").kl == 0


def test_a_trace_is_json_and_html_that_escapes_what_it_shows(model: MemoryModel) -> None:
    found = trace(model, "\u202e<b>The river", top=3)
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert content["logit"] == pytest.approx(sum(content["parts"].values()))
    assert content["layers"][1]["by_effect"][0]["memory"] == str(found.layers[1].by_effect[0].memory)
    assert len(content["layers"][2]["output"]) == 3 and repr(found).startswith("<Trace of ")
    html = found._repr_html_()
    assert "<b>The" not in html and str(found.memories[0].memory) in html
    # a sign that turns writing round is shown as text
    assert "\u202e" not in html and '<code style="white-space:pre;unicode-bidi:isolate">\\u202e&lt;b&gt;The' in html


@pytest.fixture(scope="module")
def indexed(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    folder = tmp_path_factory.mktemp("traced") / "index"
    index = memlens.scan(model, tiny_text, out=folder, top=3, layers=[0, 2], threads=1)
    compute_values(index, model, top=5)
    return memlens.Index(folder), model


def test_an_index_adds_triggers_and_the_tokens_of_its_table(indexed: Indexed) -> None:
    index, model = indexed
    rows = {(row["layer"], row["memory"]): row for row in index.table("values").to_pylist()}
    bare, named = trace(model, PROMPT, top=5), trace(model, PROMPT, top=5, index=index)
    for one, other in zip(bare.memories, named.memories, strict=True):
        assert [token.id for token in one.promotes] == [token.id for token in other.promotes]
        assert one.trigger is None
        if other.memory.layer == 1:  # not scanned
            assert other.trigger is None
            continue
        row = rows[other.memory.layer, other.memory.memory]
        assert [x.id for x in other.promotes] == row["tokens" if other.coefficient > 0 else "bottom_tokens"]
        end = "top" if other.coefficient > 0 else "bottom"
        best = index.triggers(other.memory, end, 1)
        assert other.trigger == (best[0].text[-60:] if best else None)
    assert any(memory.trigger for memory in named.memories)


def test_an_index_with_patterns_adds_what_they_say(indexed: Indexed, copy_of: Callable[..., memlens.Index]) -> None:
    index, model = copy_of(indexed[0]), indexed[1]
    shown = trace(model, PROMPT, top=40).layers[2].by_effect
    positive, negative = (next(one.memory for one in shown if one.coefficient * sign > 0) for sign in (1, -1))
    rows = [
        {
            "layer": 2,
            "memory": memory.memory,
            "pattern": text,
            "kind": "shallow",
            "description": text,
            "prefixes": [0],
        }
        for memory in (positive, negative)
        for text in ("ends with 'to'", "rivers")
    ]
    table = complete_table("patterns", rows, PATTERNS_SCHEMA)
    index.write({"patterns": (table.schema, [table])}, dict)
    named = {one.memory: one.patterns for one in trace(model, PROMPT, top=40, index=index).memories}
    assert named[positive] == ("ends with 'to'", "rivers")
    assert named[negative] == ()  # patterns are those of the triggers at the other end
    assert sum(map(bool, named.values())) == 1


def test_a_value_that_was_changed_is_not_named_by_the_table(indexed: Indexed) -> None:
    index, model = indexed
    for one in trace(model, PROMPT, top=5).layers[2].by_size:
        turned = ValueChange.replaced(model, one.memory, -model.layers[2].values[one.memory.memory])
        for change in (turned, ValueChange.towards(model, one.memory, 9, 50.0)):
            with trying(model, change):
                traces = [trace(model, PROMPT, top=5, index=given) for given in (None, index)]
            bare, named = ({x.memory: x for x in found.layers[2].by_size}[one.memory] for found in traces)
            assert bare.promotes == named.promotes and bare.demotes == named.demotes


def test_tokens_are_those_of_the_lens_though_the_table_was_read_raw(
    indexed: Indexed, copy_of: Callable[..., memlens.Index]
) -> None:
    index, model = copy_of(indexed[0]), indexed[1]
    compute_values(index, model, top=5, reading="raw")
    bare, named = (trace(model, PROMPT, top=5, index=given) for given in (None, memlens.Index(index.folder)))
    assert [one.promotes for one in bare.memories] == [one.promotes for one in named.memories]


def test_an_index_of_another_model_is_refused(indexed: Indexed) -> None:
    index, model = indexed
    for family, seed, words in (
        ("bloom", 0, "is not an index of"),
        ("gpt2", 0, "its family is llama, not gpt2"),
        ("llama", 1, "its values differ"),
    ):
        with pytest.raises(ModelError, match=words):
            trace(memlens.load(tiny_model(family, seed), tokenizer=tiny_tokenizer()), PROMPT, index=index)
    with trying(model, ValueChange.towards(model, "L0N0", 9, 50.0)):  # with a few values changed it is still its model
        assert trace(model, PROMPT, index=index).memories
    coarse = memlens.load(tiny_model("llama").to(torch.bfloat16), tokenizer=tiny_tokenizer())
    assert trace(coarse, PROMPT, index=index).memories


# The paper's kind of model: whole words, an adaptive softmax, and what may be called a logit there

WORDS_PROMPT = "the city of"


@pytest.fixture(scope="module")
def words() -> MemoryModel:
    return memlens.load(Path(__file__).parents[1] / "golden" / "fixture")


def normalisers(model: MemoryModel, state: torch.Tensor, word: int) -> float:
    """log of what the word's score is divided by: the head's sum and, for a rarer word, its band's as well."""
    softmax = model.network.output
    total = float((torch.cat([softmax.words, softmax.classes]) @ state).logsumexp(0))
    for band, tail in enumerate(softmax.tails):
        if softmax.ends[band] <= word < softmax.ends[band + 1]:
            total += float((tail.words @ (tail.projection.T @ state)).logsumexp(0))
    return total


def some_words(model: MemoryModel) -> list[int]:
    """One word of each band, and the last of all."""
    starts = [0, *model.network.output.ends]
    return [*(start + 5 for start in starts[:-1]), starts[-1] - 1]


def test_the_logit_of_a_word_of_any_band_is_log_p_but_for_the_normalisers(words: MemoryModel) -> None:
    state = words.run_body(fed(words, WORDS_PROMPT))[0, -1]
    assert len(words.network.output.ends) > 1
    with torch.no_grad():
        for word in some_words(words):
            found = trace(words, WORDS_PROMPT, token=word)
            log_p = float(words.lens.state_logits(state)[word])
            assert found.logit == pytest.approx(log_p + normalisers(words, state, word), abs=1e-3)
            assert found.logit == pytest.approx(sum(found.parts.values()), abs=1e-12)
            assert found.token.p == pytest.approx(float(torch.tensor(log_p).exp()), rel=1e-3)


def test_a_trace_says_what_its_logit_is_and_has_the_spaces_of_its_text(words: MemoryModel, family: Family) -> None:
    assert "its band's class" in trace(words, WORDS_PROMPT).to_json()["logit_is"]
    assert trace(family("gpt2"), WORDS_PROMPT).to_json()["logit_is"] == "the model's own logit"
    assert "before it is soft-capped" in trace(family("gemma2"), WORDS_PROMPT)._repr_html_()
    assert [trace(words, WORDS_PROMPT, position=at).text for at in range(3)] == ["the", "the city", "the city of"]
    found = trace(words, "the  city\nof", position=1)
    assert found.text == "the  city" and "the  city" in found._repr_html_() and "'the  city'" in repr(found)


def test_a_rare_words_direction_leads_to_its_band_as_well(words: MemoryModel) -> None:
    softmax = words.network.output
    word = softmax.ends[0] + 5
    own = softmax.tails[0].words[5] @ softmax.tails[0].projection.T + softmax.classes[0]
    assert torch.allclose(token_direction(words, MemoryId(1, 0), word), own / own.norm(), atol=1e-6)
    top = trace(words, WORDS_PROMPT, token=word).layers[-1].by_size[0].memory
    change = ValueChange.towards(words, top, word, 20.0)
    before = trace(words, WORDS_PROMPT, token=word)
    with trying(words, change):
        assert trace(words, WORDS_PROMPT, token=word).token.p > before.token.p


def test_effects_on_a_word_of_any_band_can_be_integrated(words: MemoryModel) -> None:
    for word in some_words(words):
        found = memlens.integrate(words, WORDS_PROMPT, layers=[3], token=word)
        exact = memlens.silence_each(words, WORDS_PROMPT, [memory for memory, _ in found.strongest(3)], token=word)
        assert abs(found.gap) < 1e-5 and found.p == pytest.approx(exact.p, rel=1e-5)
        first, effect = found.strongest(1)[0]
        assert effect * exact.effects[first] > 0
