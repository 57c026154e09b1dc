"""Values changed: what is tried is undone bit by bit, side effects are listed, a saved checkpoint has the change."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memlens
from memlens.errors import ModelError, SettingError, UnknownName
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny
from memlens.tracer.trace import trace
from memlens.tracer.value_changes import ValueChange, save_changed, side_effects, token_direction, trying

PROMPT = "The river runs"
TOKENS = torch.tensor([[5, 17, 80, 3]])
Family = Callable[..., MemoryModel]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_what_is_tried_is_undone_bit_by_bit(name: str, family: Family) -> None:
    model = family(name)
    fingerprint, own = model.fingerprint(), model.logits(TOKENS)
    changes = [
        ValueChange.towards(model, "L1N3", 9, 5.0),
        ValueChange.replaced(model, "L2N0", torch.ones(24)),
        ValueChange.replaced(model, "L1N3", torch.full((24,), 2.0)),
    ]
    with trying(model, changes):
        assert not torch.equal(model.logits(TOKENS), own)
        assert torch.equal(model.layers[1].values[3], torch.full((24,), 2.0))
    assert model.fingerprint() == fingerprint
    with pytest.raises(RuntimeError, match="midway"), trying(model, changes):
        raise RuntimeError("midway")
    assert model.fingerprint() == fingerprint and torch.equal(model.logits(TOKENS), own)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "opt"])
def test_a_tokens_direction_is_the_one_in_which_its_score_rises_fastest(name: str, family: Family) -> None:
    model = family(name)
    rises = model.lens.value_scores(torch.eye(24), 1)[:, 42]  # along each axis: the reading of values is linear
    assert torch.allclose(token_direction(model, MemoryId(1, 0), 42), rises / rises.norm(), atol=1e-6)


def test_the_planted_value_adds_what_algebra_says(planted: MemoryModel) -> None:
    change = ValueChange.towards(planted, "L0N11", 4, 2.0)  # memory 11 fires with 12
    axis = torch.full((24,), -1 / 24)
    axis[4] += 1
    assert torch.allclose(change.value, planted.layers[0].values[11] + 2.0 * axis / axis.norm(), atol=1e-6)
    before = planted.run_body(TOKENS)
    with trying(planted, [change]):
        after = planted.run_body(TOKENS)
        found = trace(planted, PROMPT, token=4)
    assert torch.allclose(after - before, (24.0 * axis / axis.norm()).expand_as(before), atol=1e-5)
    assert trace(planted, PROMPT, token=4).logit < found.logit
    assert {str(memory.memory) for memory in found.layers[0].by_effect[:2]} == {"L0N11", "L0N4"}


def test_side_effects_name_what_changed(model: MemoryModel) -> None:
    change = ValueChange.towards(model, "L2N5", 42, 500.0)
    prompts = ["The river", "Rain fell on the hills", "The press"]
    found = side_effects(model, [change], prompts)
    assert sorted(one.prompt for one in found) == sorted(prompts)
    assert [one.kl for one in found] == sorted((one.kl for one in found), reverse=True)
    for one in found:
        tokens = torch.tensor([model.tokenizer.encode([one.prompt])[0].ids])
        before = torch.log_softmax(model.logits(tokens)[0].double(), -1)
        with trying(model, [change]):
            after = torch.log_softmax(model.logits(tokens)[0].double(), -1)
        kl = (before.exp() * (before - after)).sum(-1)
        assert (one.kl, one.mean_kl) == pytest.approx((float(kl[-1]), float(kl.mean())), abs=1e-6)
        assert one.changed == int((before.argmax(-1) != after.argmax(-1)).sum()) and one.positions == len(kl)
        assert (one.before.id, one.after.id) == (int(before[-1].argmax()), int(after[-1].argmax()))
        assert one.changes_prediction == (one.before.id != one.after.id)
    same = side_effects(model, [ValueChange.replaced(model, "L2N5", model.layers[2].values[5])], prompts)
    assert all(one.kl == 0 and one.changed == 0 for one in same)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_saved_model_has_the_change_and_the_original_has_not(name: str, tmp_path: Path) -> None:
    model = memlens.load(save_tiny(tmp_path / "own", name, adds_bos=True))
    fingerprint = model.fingerprint()
    change = ValueChange.towards(model, "L1N3", 9, 5.0)
    with trying(model, [change]):
        expected = model.logits(TOKENS)
    saved = memlens.load(save_changed(model, [change], tmp_path / "edited"))
    assert list((tmp_path / "edited").glob("*.safetensors"))
    assert torch.equal(saved.logits(TOKENS), expected)
    assert saved.tokenizer.serialized() == model.tokenizer.serialized() and saved.tokenizer.adds_bos
    assert model.fingerprint() == fingerprint != saved.fingerprint()


def test_what_cannot_be_saved_is_refused(model: MemoryModel, tmp_path: Path) -> None:
    change = ValueChange.towards(model, "L1N3", 9, 5.0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for place in (tmp_path / "full", tmp_path / "full" / "notes.txt"):
        with pytest.raises(SettingError, match="is not an empty folder"):
            save_changed(model, [change], place)
    model.source = "somewhere/model.gguf"
    with pytest.raises(ModelError, match=r"is a \.gguf file"):
        save_changed(model, [change], tmp_path / "new")
    words = memlens.load(Path(__file__).parents[1] / "golden" / "fixture")
    with pytest.raises(ModelError, match="cannot be saved as a safetensors checkpoint"):
        save_changed(words, [], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (("L9N0", 9, 1.0), UnknownName, "L9N0 does not exist"),
        (("L0N0", 97, 1.0), UnknownName, "tokens 0 to 96"),
        (("L0N0", 9, float("inf")), SettingError, "finite"),
    ],
)
def test_wrong_changes_are_refused(
    model: MemoryModel, given: tuple[str, int, float], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ValueChange.towards(model, *given)
    with pytest.raises(SettingError, match="there are no prompts"):
        side_effects(model, [], [])
