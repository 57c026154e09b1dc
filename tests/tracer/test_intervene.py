"""Interventions do exactly what algebra says, at exactly the places named, and can be saved and replayed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memlens
from memlens.errors import ModelError, SettingError
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.testing import FAMILIES, tiny_model, tiny_tokenizer
from memlens.tracer.intervene import apply_edits, generate, intervene, promoting
from memlens.tracer.intervention import Edit, Intervention
from memlens.tracer.prompt import read_prompt
from memlens.tracer.trace import trace

PROMPT = "The river runs"
WORDS = Path(__file__).parents[1] / "golden" / "fixture"
Family = Callable[..., MemoryModel]


def run(model: MemoryModel, intervention: Intervention) -> torch.Tensor:
    prompt = read_prompt(model, PROMPT)
    with apply_edits(model, intervention, prompt):
        return model.logits(prompt.fed())


@pytest.mark.parametrize("name", [*FAMILIES, "words"])
def test_silencing_a_layer_leaves_its_bias_alone_and_scaling_by_one_everything(name: str, family: Family) -> None:
    model = memlens.load(WORDS) if name == "words" else family(name)
    prompt = read_prompt(model, PROMPT)
    with apply_edits(model, Intervention.parse("L1=0"), prompt), model.record() as recording:
        model.run_body(prompt.fed())
    block = model.layers[1]
    bias = block.groups[0].value_bias
    expected = torch.zeros(model.width) if bias is None else bias
    if block.post_norm is not None:
        expected = block.post_norm(expected)
    assert torch.equal(recording.y[1], expected.expand_as(recording.y[1]))
    assert not recording.coefficients[1].any() and recording.coefficients[0].any()
    own = model.logits(prompt.fed())
    assert torch.equal(run(model, Intervention.parse("L0=x1", "L1=x1", "L2=x1", "L1N3=x1", "L2N7=x1")), own)
    assert not torch.equal(run(model, Intervention.parse("L1=x1.5")), own)


def planted_logits(coefficients: dict[int, float]) -> torch.Tensor:
    """The planted model by hand: [97] logits, with some coefficients other than i + 1."""
    state = torch.zeros(24, dtype=torch.float64)
    state[23] = 1
    for memory in range(12):
        m = coefficients.get(memory, memory + 1.0)
        state[memory] += m
        state[memory + 11] -= m
    state = (state - state.mean()) / torch.sqrt(state.var(correction=0) + 1e-5)
    return state[torch.arange(97) % 24]


@pytest.mark.parametrize(
    ("edits", "coefficients"),
    [
        (["L0N3=0"], {3: 0.0}),
        (["L0N3=7.5", "L0N11=-2"], {3: 7.5, 11: -2.0}),
        (["L0N3=x2", "L0N3=x-3"], {3: -24.0}),
        (["L0N5=9", "L0N5=x0.5"], {5: 4.5}),
        (["L0=x0.25"], {memory: (memory + 1) / 4 for memory in range(12)}),
        (["L0N30=100"], {}),  # a memory without a value
    ],
)
def test_the_planted_model_does_what_algebra_says(
    planted: MemoryModel, edits: list[str], coefficients: dict[int, float]
) -> None:
    found = intervene(planted, PROMPT, Intervention.parse(*edits), token=27)
    before, after = planted_logits({}), planted_logits(coefficients)
    assert found.before.logit == pytest.approx(float(before[27]), abs=1e-5)
    assert found.after.logit == pytest.approx(float(after[27]), abs=1e-5)
    p, q = torch.log_softmax(before, 0), torch.log_softmax(after, 0)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-6)
    assert found.after.prediction.id == int(after.argmax())
    assert found.changes_prediction == (int(before.argmax()) != int(after.argmax()))
    assert found.after.token.id == 27 and found.after.token.p == pytest.approx(float(q[27].exp()), rel=1e-5)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_only_the_named_memories_at_the_named_positions_are_changed(family: Family, adds_bos: bool) -> None:
    model = family("llama", adds_bos)
    prompt = read_prompt(model, PROMPT)
    edit = Edit(memories=(MemoryId(0, 5), MemoryId(0, 2), MemoryId(0, 5)), factor=3.0, positions=(1, -1))
    with model.record() as plain:
        model.run_body(prompt.fed())
    with apply_edits(model, Intervention((edit,)), prompt), model.record() as changed:
        model.run_body(prompt.fed())
    expected = plain.coefficients[0].clone()
    for position in (1 + adds_bos, prompt.fed().shape[1] - 1):
        for memory in (2, 5):
            expected[0, position, memory] *= 3.0
    assert torch.equal(changed.coefficients[0], expected)


def test_a_trace_within_an_intervention_is_the_comparisons_second_half(model: MemoryModel) -> None:
    intervention = Intervention.parse("L1N3=4", "L2N8=x-2")
    found = intervene(model, PROMPT, intervention, token=9)
    with apply_edits(model, intervention, read_prompt(model, PROMPT)):
        assert trace(model, PROMPT, token=9) == found.after
    assert trace(model, PROMPT, token=9) == found.before
    own = run(model, intervention)[0, -1]
    assert found.after.logit == pytest.approx(float(own[9]), abs=1e-4)
    shown = {one.memory: one.coefficient for one in trace(model, PROMPT, top=40).layers[1].by_size}
    assert shown[MemoryId(1, 3)] != 4.0
    json.dumps(found.to_json(), allow_nan=False)
    assert "→" in found._repr_html_() and repr(found).startswith("<InterventionEffect")


def test_an_intervention_is_saved_read_and_replayed(model: MemoryModel, tmp_path: Path) -> None:
    edits = (
        Edit.parse("L1N3=4.25"),
        Edit.parse("L2=x-2", (0, -1)),
        Edit(memories=(MemoryId(0, 1), MemoryId(2, 30)), positions=(1,)),
    )
    assert [edit.action for edit in edits] == ["set", "scale", "silence"]
    Intervention(edits).save(tmp_path / "edits.json", model)
    document = json.loads((tmp_path / "edits.json").read_text())
    assert document["unit"] == "coefficient" and document["model"]["fingerprint"] == model.fingerprint()
    again = Intervention.load(tmp_path / "edits.json")
    assert again.edits == edits and again.fingerprint == model.fingerprint()
    assert torch.equal(run(model, again), run(model, Intervention(edits)))
    both = Intervention.parse("L0N0=0") + again
    assert both.fingerprint == again.fingerprint and both.edits == (Edit.parse("L0N0=0"), *edits)


def test_a_group_is_every_memory_that_promotes_one_of_the_tokens(tiny_gpt2_values: memlens.Index) -> None:
    index = tiny_gpt2_values
    tokens = {index.vocabulary.index(" the"), index.vocabulary.index("e")}
    for end, column in (("top", "tokens"), ("bottom", "bottom_tokens")):
        found = promoting(index, [" the", "e"], end=end, within=4)
        rows = index.table("values").to_pylist()
        expected = {MemoryId(row["layer"], row["memory"]) for row in rows if tokens & set(row[column][:4])}
        assert expected and set(found) == expected and len(found) == len(expected)
    compared = intervene(index, PROMPT, Edit(memories=found))
    assert compared.kl > 0 and any(memory.trigger for memory in compared.after.memories)


def naive_greedy(model: MemoryModel, count: int, change: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    tokens = read_prompt(model, PROMPT).fed()
    for _ in range(count):
        with model.edit({1: lambda m, _: change(m)}):
            best = model.logits(tokens)[0, -1].argmax()
        tokens = torch.cat([tokens, best.reshape(1, 1)], dim=1)
    return tokens[0, -count:].tolist()


def test_greedy_continuations_are_those_of_a_plain_loop(family: Family) -> None:
    model = family("llama", True)
    plain = generate(model, PROMPT, 6)
    assert list(plain.tokens) == naive_greedy(model, 6, lambda m: m)
    edited = generate(model, PROMPT, 6, Intervention.parse("L1=x-5"))
    assert list(edited.tokens) == naive_greedy(model, 6, lambda m: m * -5) != list(plain.tokens)
    assert str(plain) == PROMPT + plain.text and len(plain.p) == 6 and all(0 < p <= 1 for p in plain.p)


def test_sampled_continuations_follow_the_seed(family: Family) -> None:
    model = family("gpt2")
    first = generate(model, PROMPT, 12, temperature=1.0, seed=3)
    assert generate(model, PROMPT, 12, temperature=1.0, seed=3) == first
    assert any(generate(model, PROMPT, 12, temperature=1.0, seed=seed) != first for seed in (4, 5))
    nothing = Intervention.parse("L1N1=x1")
    assert generate(model, PROMPT, 12, nothing, temperature=1.0, seed=3) == first
    cold = generate(model, PROMPT, 8, temperature=1e-4, seed=1)
    assert cold.tokens == generate(model, PROMPT, 8).tokens


def test_a_model_of_whole_words_goes_on_in_words() -> None:
    model = memlens.load(WORDS)
    found = generate(model, "the city of", 3)
    words = [model.tokenizer.token_text(token) for token in found.tokens]
    assert str(found) == "the city of " + " ".join(words)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2_moe"])
def test_other_code_runs_the_edited_network(name: str) -> None:
    model = memlens.load(tiny_model(name), tokenizer=tiny_tokenizer())
    tokens = read_prompt(model, PROMPT).fed()
    network, plain = model.network, model.logits(tokens)
    with memlens.hooked(model, "L1=0") as edited:
        assert edited is network
        logits = edited(input_ids=tokens).logits
        continued = edited.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)  # with its cache
    assert torch.equal(logits, run(model, Intervention.parse("L1=0"))) and not torch.equal(logits, plain)
    assert tuple(continued[0, tokens.shape[1] :].tolist()) == generate(model, PROMPT, 4, "L1=0").tokens
    assert torch.equal(model.logits(tokens), plain)
    with pytest.raises(SettingError, match="names positions"), memlens.hooked(model, Edit(layer=1, positions=(0,))):
        pass
    with pytest.raises(ModelError, match="not a transformers model"), memlens.hooked(WORDS, "L1=0"):
        pass
