"""Watching, recording and editing, independent of the architecture."""

import pytest
import torch

from memlens.errors import ModelError, SettingError, UnknownName
from memlens.models.load import load
from memlens.testing import CONTEXT, LAYERS, tiny_model, tiny_network, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(scope="module")
def model():
    return load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())


def recorded(model, tokens=TOKENS, edits=None, **options):
    with model.edit(edits or {}), model.record(**options) as recording:
        model.run_body(tokens)
    return recording


def test_only_selected_layers_are_watched(model):
    layers = []
    with model.watch(lambda layer, m: layers.append(layer), layers=[2, 0]):
        model.run_body(TOKENS)
        model.run_body(TOKENS)
    assert layers == [0, 2, 0, 2]


def test_only_requested_parts_are_recorded(model):
    recording = recorded(model, layers=[1], coefficients=False)
    assert list(recording.y) == list(recording.o) == list(recording.r) == [1] and recording.coefficients == {}
    recording = recorded(model, states=False)
    assert recording.embedding is None and recording.o == {} and len(recording.coefficients) == LAYERS


def test_a_recording_holds_the_latest_pass(model):
    with model.record() as recording:
        model.run_body(TOKENS)
        first = recording.o[0]
        model.run_body(TOKENS[:1, :2])
    assert recording.o[0].shape[:2] == (1, 2)
    torch.testing.assert_close(recording.o[0], first[:1, :2])


def test_a_layer_that_does_not_exist_is_refused(model):
    for layer in (-1, LAYERS):
        with pytest.raises(UnknownName, match="has layers 0 to 2"), model.record(layers=[layer]):
            pass
        with pytest.raises(UnknownName), model.edit({layer: torch.zeros_like}):
            pass


def test_watchers_see_edited_coefficients_in_any_order_and_nested_edits_run_outer_first(model):
    plain = recorded(model)
    with model.record() as outside, model.edit({1: lambda m, _: m * 2}), model.record() as inside:
        model.run_body(TOKENS)
    for recording in (outside, inside):
        assert torch.equal(recording.coefficients[1], plain.coefficients[1] * 2)
        assert torch.equal(recording.coefficients[0], plain.coefficients[0])
    with model.edit({0: lambda m, _: m + 1}):
        recording = recorded(model, edits={0: lambda m, _: m * 3})
    assert torch.equal(recording.coefficients[0], (plain.coefficients[0] + 1) * 3)


def test_an_edit_of_one_memory_changes_the_output_by_that_memory_times_its_value(model):
    seventh = torch.arange(model.layers[2].memories) == 7
    before = recorded(model)
    after = recorded(model, edits={2: lambda m, _: torch.where(seventh, 5.0, m)})
    change = (5.0 - before.coefficients[2][..., 7, None]) * model.layers[2].values[7]
    torch.testing.assert_close(after.o[2] - before.o[2], change, rtol=1e-4, atol=1e-5)


def test_a_value_projection_that_is_called_by_name_is_watched_and_edited():
    network = tiny_model("llama")
    for block in network.model.layers:
        mlp = block.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    model = load(network)
    before, after = recorded(model), recorded(model, edits={2: lambda m, _: m * 2})
    assert torch.equal(after.coefficients[2], before.coefficients[2] * 2)
    torch.testing.assert_close(after.y[2] - before.y[2], before.coefficients[2] @ model.layers[2].values)


def test_a_closed_gate_of_a_shared_expert_allows_only_zero_coefficients():
    network = tiny_network("qwen2_moe")
    model = load(network)
    with torch.no_grad():
        network.model.layers[1].mlp.shared_expert_gate.weight.mul_(1e6)
    before = recorded(model)
    silent = recorded(model, edits={1: lambda c, _: torch.zeros_like(c)})
    (shared,) = (group for group in model.layers[1].groups if group.kind == "shared")
    assert (before.coefficients[1][..., shared.columns] == 0).all(-1).any()
    assert torch.isfinite(silent.o[1]).all() and not silent.coefficients[1].any()
    with pytest.raises(SettingError, match="gate of shared expert 0 is 0 at a token"):
        recorded(model, edits={1: lambda c, _: torch.ones_like(c)})


def test_recorded_states_are_copies():
    # Falcon adds the attention output in place to the output of its feed-forward block
    model = load(tiny_model("falcon"))
    with model.record() as recording:
        last = model.run_body(TOKENS)
    memories = model.layers[0]
    expected = recording.coefficients[0] @ memories.values + memories.groups[0].value_bias
    torch.testing.assert_close(recording.y[0], expected)
    before = recording.o[LAYERS - 1].clone()
    last.zero_()
    assert torch.equal(recording.o[LAYERS - 1], before)


def test_states_of_a_half_precision_model_are_recorded_in_float32():
    model = load(tiny_model("llama").to(torch.bfloat16))
    recording = recorded(model)
    logits = model.lens.state_logits(recording.o[LAYERS - 1])
    states = (recording.o[0], recording.r[0], recording.embedding, logits)
    assert {state.dtype for state in states} == {torch.float32} and recording.coefficients[0].dtype == torch.bfloat16
    assert torch.equal(logits, model.logits(TOKENS).float())


def test_a_body_runs_in_inference_mode_and_builds_no_graph_without_it(model):
    assert not model.run_body(TOKENS).requires_grad
    with torch.inference_mode():
        assert torch.equal(model.run_body(TOKENS), model.run_body(TOKENS))


def test_invalid_tokens_are_rejected(model):
    with pytest.raises(SettingError, match=f"33 tokens are more than .* \\({CONTEXT}\\)"):
        model.run_body(torch.zeros(1, 33, dtype=torch.int64))
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64)):
        with pytest.raises(SettingError, match="batch, pos"):
            model.logits(wrong)


def test_padding_without_a_mask_causes_no_warning(capfd):
    model = load(tiny_model("gpt2", pad_token_id=0))
    plain = load(tiny_model("gpt2"))
    padded = torch.tensor([[5, 6, 0, 0]])
    assert torch.equal(model.run_body(padded), plain.run_body(padded))
    assert capfd.readouterr().err == ""


def test_a_model_without_a_tokenizer_says_so_when_text_is_needed():
    model = load(tiny_model("gpt2"))
    assert not model.has_tokenizer
    with pytest.raises(ModelError, match="tokenizer="):
        _ = model.tokenizer
