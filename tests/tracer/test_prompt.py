"""Every function takes a name, a folder, a loaded model or an index as the model, and one text or several."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memlens
from memlens.errors import MemlensError, ModelError, SettingError
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.tracer.intervention import Edit, Intervention
from memlens.tracer.result import Trace
from memlens.tracer.value_changes import ValueChange

PROMPT = "The river runs"


@pytest.fixture(scope="module")
def folder(tiny_gpt2: Path, tiny_gpt2_values: memlens.Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and index/ of it with values."""
    folder = tmp_path_factory.mktemp("even")
    (folder / "model").symlink_to(tiny_gpt2)
    (folder / "index").symlink_to(tiny_gpt2_values.folder)
    return folder


def ids(found: Trace) -> list[Any]:
    return [found.token.id, found.logit, [one.memory for one in found.memories]]


CHANGE = ValueChange(MemoryId(1, 3), torch.full((24,), 2.0))
CALLS: dict[str, Callable[[Any], Any]] = {
    "trace": lambda model: ids(memlens.trace(model, PROMPT)),
    "intervene": lambda model: memlens.intervene(model, PROMPT, "L1N3=4").kl,
    "generate": lambda model: memlens.generate(model, PROMPT, 3, "L1N3=4"),
    "silence_each": lambda model: memlens.silence_each(model, PROMPT, ["L1N3", "L0N0"]),
    "integrate": lambda model: memlens.integrate(model, PROMPT, layers=[1], steps=2).to_json(),
    "towards": lambda model: memlens.ValueChange.towards(model, "L1N3", " the", 2.0).value.tolist(),
    "replaced": lambda model: memlens.ValueChange.replaced(model, "L1N3", [2.0] * 24).value.tolist(),
    "side_effects": lambda model: memlens.side_effects(model, CHANGE, PROMPT),
    "meant_for": lambda model: memlens.Intervention.parse("L1N3=0").meant_for(model),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_is_a_name_a_folder_a_loaded_one_or_an_index(folder: Path, name: str) -> None:
    model, index = folder / "model", folder / "index"
    expected = CALLS[name](memlens.load(model))
    for given in (model, str(model), index, str(index), memlens.Index(index)):
        assert CALLS[name](given) == expected


def test_an_index_that_stands_for_the_model_names_memories(folder: Path) -> None:
    index = folder / "index"
    named = memlens.trace(index, PROMPT)
    assert any(memory.trigger for memory in named.memories)
    assert memlens.trace(folder / "model", PROMPT, index=index) == named
    compared = memlens.intervene(memlens.Index(index), PROMPT, "L1N3=4")
    assert compared.before == named and memlens.intervene(folder / "model", PROMPT, "L1N3=4", index=index) == compared


def test_an_unfinished_index_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    with pytest.raises(MemlensError, match="unfinished scan"):
        memlens.trace(tmp_path, PROMPT)


def test_a_model_can_be_saved_with_a_change_by_its_name(folder: Path, tmp_path: Path) -> None:
    saved = memlens.load(memlens.save_changed(folder / "index", CHANGE, tmp_path / "edited"))
    assert torch.equal(saved.layers[1].values[3], CHANGE.value)
    with (
        pytest.raises(SettingError, match=r"with memlens\.load"),
        memlens.trying(str(folder / "model"), CHANGE),
    ):  # type: ignore[arg-type]
        pass


def test_one_text_or_several_are_taken_alike(folder: Path) -> None:
    model = memlens.load(folder / "model")
    assert memlens.side_effects(model, [CHANGE], [PROMPT]) == memlens.side_effects(model, CHANGE, PROMPT)
    assert len(memlens.side_effects(model, CHANGE, (text for text in ("The", "river")))) == 2
    assert memlens.silence_each(model, PROMPT, "L1N3") == memlens.silence_each(model, PROMPT, [MemoryId(1, 3)])
    as_texts, whole = memlens.intervene(model, PROMPT, ["L1N3=4", "L2=x2"]), Intervention.parse("L1N3=4", "L2=x2")
    assert as_texts == memlens.intervene(model, PROMPT, whole)
    assert memlens.intervene(model, PROMPT, Edit.parse("L1N3=4")) == memlens.intervene(model, PROMPT, "L1N3=4")
    attribution = memlens.silence_each(model, PROMPT, layers=[2])
    assert memlens.in_common(attribution) == memlens.in_common([attribution])


def test_an_edit_in_words_reads_as_the_same_edit() -> None:
    one = (MemoryId(0, 3),)
    for edit in (Edit(one, coefficient=1 / 3), Edit(layer=2, factor=-1234567.0), Edit(one), Edit(one, factor=2)):
        assert Edit.parse(str(edit)) == edit
    assert [str(Edit.parse(text)) for text in ("L0N3=x2.0", "L0N3=3.50")] == ["L0N3=x2", "L0N3=3.5"]
    several = Intervention.parse("L0N3=0", "L0N4=0", positions=[0, 1])
    assert several.edits[1].positions == (0, 1)


def test_an_edit_takes_names_and_an_intervention_edits_in_words() -> None:
    edit = Edit(["L1N3", MemoryId(0, 2)], factor=2.0, positions=[0, -1])  # type: ignore[arg-type]
    assert edit == Edit((MemoryId(1, 3), MemoryId(0, 2)), factor=2.0, positions=(0, -1)) and hash(edit)
    assert Edit("L1N3") == Edit(memories=(MemoryId(1, 3),))  # type: ignore[arg-type]
    assert [str(Edit.parse(text)) for text in ("L1N3=0", "L2=x-2", "l1d3=4.5")] == ["L1N3=0", "L2=x-2", "L1N3=4.5"]
    words: Any = ["L0N1=0", "L2=x3"]
    assert Intervention(words) == Intervention.parse("L0N1=0", "L2=x3") == Intervention.of(words)
    assert Intervention(words[0]).edits == (Edit.parse("L0N1=0"),)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(23), r"shape \[23\], not \[24\]"),
        (torch.ones(1, 24), r"shape \[1, 24\]"),
        (torch.tensor(1.0), r"shape \[\]"),
        (torch.full((24,), torch.nan), "not finite in float32"),
        (torch.full((24,), 1e300, dtype=torch.float64), "not finite in float32"),
    ],
)
def test_a_change_that_does_not_suit_the_model_is_refused_everywhere(
    model: MemoryModel, value: torch.Tensor, words: str, tmp_path: Path
) -> None:
    own = model.fingerprint()
    change = ValueChange(MemoryId(1, 3), value)
    for use in (
        lambda: memlens.trying(model, [CHANGE, change]).__enter__(),
        lambda: memlens.side_effects(model, change, PROMPT),
        lambda: memlens.save_changed(model, change, tmp_path / "edited"),
        lambda: ValueChange.replaced(model, "L1N3", value),
    ):
        with pytest.raises(SettingError, match=words):
            use()
    assert model.fingerprint() == own and not (tmp_path / "edited").exists()


def test_a_group_is_found_by_the_folder_and_cannot_reach_beyond_its_table(folder: Path) -> None:
    index = memlens.Index(folder / "index")
    assert memlens.promoting(folder / "index", " the", within=9) == memlens.promoting(index, " the", within=9)
    assert memlens.promoting(index, " the", within=9, limit=1) == memlens.promoting(index, " the", within=9)[:1]
    with pytest.raises(SettingError, match="lists 9 tokens per value, fewer than 13"):
        memlens.promoting(index, " the", within=13)
    for wrong in ({"within": 0}, {"limit": 0}, {"limit": -1}):
        with pytest.raises(SettingError, match="it must be 1 or more"):
            memlens.promoting(index, " the", **wrong)  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        memlens.trace(tiny_model("gpt2"), PROMPT)
    assert memlens.trace(memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), PROMPT).rank == 1
