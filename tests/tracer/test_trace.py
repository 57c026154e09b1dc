"""What a trace says is what the model did: parts add up, tops and cases are the model's own, nothing stays behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import memlens
from memlens.errors import MemlensError, ModelError
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.testing import FAMILIES, tiny_model, tiny_tokenizer
from memlens.tracer.trace import trace
from memlens.tracer.value_changes import ValueChange, trying
from memlens.vocab.table import compute_values

PROMPT = "The river runs to the sea"
Family = Callable[..., MemoryModel]


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
    last = recording.o[2][0, -1]
    norm = model.lens.final_norm
    assert norm is not None and norm.gain is not None
    for memory in (layer.by_effect[0] for layer in found.layers):
        value = model.layers[memory.memory.layer].values[memory.memory.memory]
        m = recording.coefficients[memory.memory.layer][0, -1, memory.memory.memory]
        centred = m * (value - value.mean())
        scale = torch.sqrt(last.var(correction=0) + norm.epsilon)
        expected = (centred * norm.gain / scale) @ model.lens.embedding[found.token.id]
        assert memory.effect == pytest.approx(float(expected), abs=1e-5)
        assert memory.coefficient == pytest.approx(float(m)) and memory.size == pytest.approx(
            float(abs(m) * value.norm()), rel=1e-5
        )


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma2"])
def test_tokens_probabilities_cases_and_settling_are_those_of_the_states(name: str, family: Family) -> None:
    model = family(name)
    found = trace(model, PROMPT, top=4)
    with model.record() as recording:
        model.run_body(fed(model))
    tops = []
    for layer in found.layers:
        states = [store[layer.layer][0, -1] for store in (recording.r, recording.y, recording.o)]
        p = [model.lens.probabilities(model.lens.state_logits(state)) for state in states]
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


def test_after_a_thousand_traces_the_model_has_the_hooks_it_had() -> None:
    network = tiny_model("gpt2", n_layer=1)
    model = memlens.load(network, tokenizer=tiny_tokenizer())
    network.transformer.h[0].register_forward_hook(lambda *_: None)  # somebody's own
    attention = network.transformer.h[0].attn
    own, calls = attention.forward, 0

    def fail_every_third(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RuntimeError("out of memory, say")
        return own(*arguments, **named)

    attention.forward = fail_every_third
    before, failed = hooks_of(model), 0
    assert before == 1
    for number in range(1000):
        try:
            trace(model, "The", token=None if number % 5 else 4000, top=1)
        except (RuntimeError, MemlensError):
            failed += 1
    assert 200 < failed < 800
    assert hooks_of(model) == before


def test_interventions_and_attributions_that_fail_midway_leave_no_hooks(model: MemoryModel) -> None:
    last = model.network.transformer.h[2]
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
        lambda: memlens.intervene(model, "The", "L1N3=4", top=1),
        lambda: memlens.generate(model, "The", 3, "L1N3=4"),
        lambda: memlens.silence_each(model, "The", ["L1N3", "L0N0"]),
        lambda: memlens.integrate(model, "The", layers=[1], steps=2),
        lambda: memlens.side_effects(model, [], "The"),
    ]
    for number in range(40):
        try:
            tries[number % 5]()
        except RuntimeError:
            failed += 1
    assert failed >= 30 and hooks_of(model) == before == 0
    last.forward = own
    assert memlens.intervene(model, "The", "L1N3=x1").kl == 0


def test_a_trace_is_json_and_html_that_escapes_what_it_shows(model: MemoryModel) -> None:
    found = trace(model, "<b>The river", top=3)
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert content["logit"] == pytest.approx(sum(content["parts"].values()))
    assert content["layers"][1]["by_effect"][0]["memory"] == str(found.layers[1].by_effect[0].memory)
    assert len(content["layers"][2]["output"]) == 3
    html = found._repr_html_()
    assert "<b>The" not in html and "&lt;b&gt;The" in html and str(found.memories[0].memory) in html
    assert repr(found).startswith("<Trace of ")


def test_a_sign_that_turns_writing_round_is_shown_as_text_in_html(model: MemoryModel) -> None:
    html = trace(model, "\u202eThe river", top=1)._repr_html_()
    assert "\u202e" not in html and '<code style="white-space:pre;unicode-bidi:isolate">\\u202eThe' in html


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[memlens.Index, MemoryModel]:
    folder = tmp_path_factory.mktemp("traced")
    (folder / "text.txt").write_text("The river runs to the sea. Rain fell on the hills. The press was free.\n")
    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    index = memlens.scan(model, folder / "text.txt", out=folder / "index", top=3, layers=[0, 2], threads=1)
    compute_values(index, model, top=5)
    return memlens.Index(index.folder), model


def test_an_index_adds_triggers_and_the_tokens_of_its_table(indexed: tuple[memlens.Index, MemoryModel]) -> None:
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


def test_an_index_with_patterns_adds_what_they_say(indexed: tuple[memlens.Index, MemoryModel], tmp_path: Path) -> None:
    index, model = indexed
    shown = trace(model, PROMPT, top=40).layers[2].by_effect
    copy = memlens.Index(shutil.copytree(index.folder, tmp_path / "index"))
    positive, negative = (next(one.memory for one in shown if one.coefficient * sign > 0) for sign in (1, -1))
    rows = [
        {"layer": 2, "memory": memory.memory, "pattern": number, "kind": "shallow", "description": text}
        for memory in (positive, negative)
        for number, text in enumerate(["ends with 'to'", "rivers"])
    ]
    table = pa.Table.from_pylist(rows)
    copy.write({"patterns": (table.schema, [table])}, dict)
    named = {one.memory: one.patterns for one in trace(model, PROMPT, top=40, index=copy).memories}
    assert named[positive] == ("ends with 'to'", "rivers")
    assert named[negative] == ()  # patterns are those of the triggers at the other end
    assert sum(map(bool, named.values())) == 1


@pytest.mark.parametrize("amount", ["turned round", "towards token 9"])
def test_a_value_that_was_changed_is_not_named_by_the_table(
    indexed: tuple[memlens.Index, MemoryModel], amount: str
) -> None:
    index, model = indexed
    for one in trace(model, PROMPT, top=5).layers[2].by_size:
        change = ValueChange.towards(model, one.memory, 9, 50.0)
        if amount == "turned round":
            change = ValueChange.replaced(model, one.memory, -model.layers[2].values[one.memory.memory])
        with trying(model, change):
            bare, named = (trace(model, PROMPT, top=5, index=given) for given in (None, index))
        of_memory = [{x.memory: x for x in found.layers[2].by_size}.get(one.memory) for found in (bare, named)]
        assert of_memory[0] is not None and of_memory[1] is not None
        assert of_memory[0].promotes == of_memory[1].promotes and of_memory[0].demotes == of_memory[1].demotes


def test_tokens_are_those_of_the_lens_though_the_table_was_read_raw(
    indexed: tuple[memlens.Index, MemoryModel], tmp_path: Path
) -> None:
    index, model = indexed
    copy = memlens.Index(shutil.copytree(index.folder, tmp_path / "index"))
    compute_values(copy, model, top=5, reading="raw")
    bare, named = (trace(model, PROMPT, top=5, index=given) for given in (None, memlens.Index(copy.folder)))
    assert [one.promotes for one in bare.memories] == [one.promotes for one in named.memories]


def test_an_index_of_another_shape_of_model_is_refused(indexed: tuple[memlens.Index, MemoryModel]) -> None:
    other = memlens.load(tiny_model("bloom"), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="is not an index of"):
        trace(other, PROMPT, index=indexed[0])


def test_an_index_of_another_model_of_the_same_shape_is_refused(indexed: tuple[memlens.Index, MemoryModel]) -> None:
    other = memlens.load(tiny_model("llama", seed=1), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="its values are others"):
        trace(other, PROMPT, index=indexed[0])
    with pytest.raises(ModelError, match="family llama, not gpt2"):
        trace(memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), PROMPT, index=indexed[0])
    index, model = indexed
    change = ValueChange.towards(model, "L0N0", 9, 50.0)
    with trying(model, change):  # a model of which a few values are changed is still its model
        assert trace(model, PROMPT, index=index).memories
    coarse = memlens.load(tiny_model("llama").to(torch.bfloat16), tokenizer=tiny_tokenizer())
    assert trace(coarse, PROMPT, index=index).memories


def test_the_paper_kind_of_model_can_be_traced() -> None:
    model = memlens.load(Path(__file__).parents[1] / "golden" / "fixture")
    found = trace(model, "the city of", top=4)
    own = model.logits(fed(model, "the city of"))[0, -1]
    assert found.token.id == int(own.argmax())
    assert found.token.p == pytest.approx(float(own.max().exp()), rel=1e-4)
    # of an adaptive softmax the logit is the word's score before it is normalised
    state = model.run_body(fed(model, "the city of"))[0, -1]
    assert found.logit == pytest.approx(float(state @ model.lens.embedding[found.token.id]), abs=1e-3)
    assert isinstance(found.memories[0].memory, MemoryId)
