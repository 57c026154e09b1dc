"""Bad input is refused in one line that says what, why and what to do; before anything runs."""

import copy
import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memlens
from memlens.errors import MemlensError, ModelError, SettingError, UnknownName
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.testing import CONTEXT, tiny_model, tiny_tokenizer
from memlens.tracer.attribution import integrate, silence_each
from memlens.tracer.intervene import generate, intervene
from memlens.tracer.intervention import Edit, Intervention
from memlens.tracer.trace import trace
from memlens.tracer.value_changes import ValueChange

PROMPT = "The river runs"


def refusal(call: Callable[[], Any], kind: type[MemlensError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and type(caught.value) is kind
    return message


@pytest.mark.parametrize("text", ["L3N0=0", "L0N40=0", "L3=x2", "L99N1=3"])
def test_memories_and_layers_that_do_not_exist(model: MemoryModel, text: str) -> None:
    message = refusal(lambda: intervene(model, PROMPT, text), UnknownName)
    assert "does not exist" in message and "0 to " in message


@pytest.mark.parametrize(
    ("texts", "words", "error"),
    [
        ("L0N0=nan L0N0=inf L0N0=-inf L0N0=xnan L0N0=1e999", "must be a finite number", SettingError),
        ("L0N0 L0N0= L0N0=x L0N0=two L0N0=2x L0N0=1_0 L0N0=٣", "write L3N51=3.5 to set", SettingError),
        ("N5=0", "the layer and the memory like L3N51", UnknownName),
        (f"L{'9' * 5000}=0", "", UnknownName),
    ],
)
def test_edits_that_cannot_be_read(texts: str, words: str, error: type[MemlensError]) -> None:
    for text in texts.split():
        assert words in refusal(lambda text=text: Edit.parse(text), error)


@pytest.fixture
def document(model: MemoryModel) -> dict[str, Any]:
    return Intervention.parse("L1N3=4", "L2=x2").meant_for(model).to_json()


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing required field `kind`": lambda d: d.pop("kind"),
    "Invalid enum value 2 - at `$.schema`": lambda d: d.update(schema=2),
    "Invalid enum value 'pre-activation' - at `$.unit`": lambda d: d.update(unit="pre-activation"),
    "field `fingerprint` - at `$.model`": lambda d: d.update(model={"name": "x"}),
    "unknown field `extra`": lambda d: d.update(extra=1),
    "Expected `array`, got `object` - at `$.edits`": lambda d: d.update(edits={}),
    "'explode' - at `$.edits[0].action`": lambda d: d["edits"][0].update(action="explode"),
    "a coefficient and a factor": lambda d: d["edits"][0].update(factor=2),
    "got `str` - at `$.edits[0].coefficient`": lambda d: d["edits"][0].update(coefficient="four"),
    "it must be a finite number": lambda d: d["edits"][0].update(coefficient=math.nan),
    "got `str` - at `$.edits[0].memories`": lambda d: d["edits"][0].update(memories="L1N3"),
    "is not the name of a memory": lambda d: d["edits"][0].update(memories=["M1"]),
    "`$.edits[0].positions[0]`": lambda d: d["edits"][0].update(positions=[0.5]),
    "`$.edits[1].layer`": lambda d: d["edits"][1].update(layer="2"),
    "exactly one of: memories, a layer, an expert": lambda d: d["edits"][1].pop("layer"),
    "got `int` - at `$.edits[0]`": lambda d: d.update(edits=[7]),
    "got `bool` - at `$.schema`": lambda d: d.update(schema=True),
    "the action 'set' does not match its numbers, which silence L1N3": lambda d: d["edits"][0].update(coefficient=None),
    "got `bool` - at `$.edits[0].coefficient`": lambda d: d["edits"][0].update(coefficient=True),
    "out of range - at `$.edits[0].coefficient`": lambda d: d["edits"][0].update(coefficient=10**400),
    "list of whole numbers, not []": lambda d: d["edits"][0].update(positions=[]),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_damaged_intervention_file_is_refused(document: dict[str, Any], words: str, tmp_path: Path) -> None:
    WRONG[words](document)
    path = tmp_path / "edits.json"
    path.write_text(json.dumps(document))
    with pytest.raises((SettingError, UnknownName)) as caught:
        Intervention.load(path)
    message = str(caught.value)
    assert words in message and str(path) in message and "\n" not in message


NO_JSON = ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '"' + "x" * 10**6, "", "{not json", "\udcff\udcfe\x00"]


def test_files_that_cannot_be_read_or_written_are_refused(model: MemoryModel, tmp_path: Path) -> None:
    for text in NO_JSON:
        (tmp_path / "bad.json").write_text(text, errors="surrogateescape")
        assert "is not a JSON document" in refusal(lambda: Intervention.load(tmp_path / "bad.json"), SettingError)
    assert "cannot be read" in refusal(lambda: Intervention.load(tmp_path / "none.json"), SettingError)
    edits = Intervention.parse("L0N0=0")
    assert "cannot be written" in refusal(lambda: edits.save(tmp_path / "no" / "x.json", model), SettingError)


def test_nesting_that_json_can_read_but_nobody_can_print_is_refused(document: dict[str, Any]) -> None:
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    for place in ("action", "coefficient", "memories", "positions", "layer"):
        damaged = copy.deepcopy(document)
        damaged["edits"][0][place] = deep
        refusal(lambda one=damaged: Intervention.from_json(one), SettingError)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-10, 1e308])
def test_any_finite_temperature_draws_a_token(model: MemoryModel, temperature: float) -> None:
    found = generate(model, PROMPT, 3, temperature=temperature, seed=2**63 - 1)
    if temperature < 1:
        assert found.tokens == generate(model, PROMPT, 3).tokens


WRONG_SETTINGS: dict[str, Callable[[MemoryModel], Any]] = {
    "has no tokens": lambda model: trace(model, ""),
    f"exceed the context of GPT2LMHeadModel ({CONTEXT} tokens)": lambda model: trace(model, "the " * (CONTEXT + 1)),
    "and 40 new ones exceed": lambda model: generate(model, PROMPT, 40),
    "must be 1 or more": lambda model: trace(model, PROMPT, top=0),
    "exactly one of": lambda model: Edit(),
    "exactly one of: memories, a layer": lambda model: Edit(memories=(MemoryId(0, 1),), layer=0),
    "give only one": lambda model: Edit(layer=0, coefficient=1.0, factor=2.0),
    "position 500 is not in the prompt": lambda model: intervene(model, PROMPT, Edit("L0N0", positions=[500])),
    "too large for float32": lambda model: intervene(model, PROMPT, "L0N0=1e39"),
    "not valid Unicode": lambda model: trace(model, "a \ud800 b"),
    "at most 1000": lambda model: trace(model, PROMPT, top=10**9),
    "the list of memories is empty": lambda model: silence_each(model, PROMPT, []),
    "the list of layers is empty": lambda model: integrate(model, PROMPT, layers=[]),
    "the list of positions is empty": lambda model: integrate(model, PROMPT, positions=[]),
    "it must be at most 1000": lambda model: integrate(model, PROMPT, steps=10**6),
    "is not finite in float32": lambda model: ValueChange.towards(model, "L0N0", 5, 1e300),
    "positions must be 'all' or a list of whole numbers, not []": lambda model: Edit("L0N0", positions=()),
    "batch_tokens is 0": lambda model: silence_each(model, PROMPT, batch_tokens=0),
    "the number of tokens is 0": lambda model: generate(model, PROMPT, 0),
    "the temperature is nan": lambda model: generate(model, PROMPT, 1, temperature=math.nan),
    "the seed is -1": lambda model: generate(model, PROMPT, 1, seed=-1),
    "the seed is 9223372036854775808": lambda model: generate(model, PROMPT, 1, seed=2**63),
}


@pytest.mark.parametrize("words", WRONG_SETTINGS)
def test_what_cannot_work_is_refused(model: MemoryModel, words: str) -> None:
    assert words in refusal(lambda: WRONG_SETTINGS[words](model), SettingError)


def test_positions_and_tokens_that_do_not_exist_and_numbers_that_drown_the_model(model: MemoryModel) -> None:
    count = len(model.tokenizer.encode([PROMPT])[0].ids)
    for position in (count, -count - 1):
        assert f"0 to {count - 1}" in refusal(lambda at=position: trace(model, PROMPT, position=at), SettingError)
    for token, words in ((" Constantinople", "is not one token"), (97, "tokens 0 to 96"), (-1, "tokens 0 to 96")):
        assert words in refusal(lambda one=token: trace(model, PROMPT, token=one), UnknownName)
    drowned = ["L2N0=3e38", "L2N1=3e38", "L2N2=3e38"]
    assert "NaN or infinite" in refusal(lambda: intervene(model, PROMPT, drowned), ModelError)


def test_an_intervention_for_another_model_or_precision_is_refused(document: dict[str, Any]) -> None:
    edits = Intervention.from_json(document)
    other = memlens.load(tiny_model("gpt2", seed=1), tokenizer=tiny_tokenizer())
    message = refusal(lambda: intervene(other, PROMPT, edits), ModelError)
    assert "is not for" in message and "fingerprint differs" in message
    coarse = memlens.load(tiny_model("gpt2").to(torch.bfloat16), tokenizer=tiny_tokenizer())
    message = refusal(lambda: intervene(coarse, PROMPT, edits), ModelError)
    assert "in float32" in message and "is loaded in bfloat16" in message and "--dtype float32" in message
    for name in ("", "x" * 5000, "no/such/folder/at/all"):
        with pytest.raises(MemlensError):
            trace(name, PROMPT)


def test_two_interventions_for_two_models_are_not_joined(document: dict[str, Any]) -> None:
    one = Intervention.from_json(document)
    other = Intervention.from_json(document | {"model": {"name": "b", "fingerprint": "f"}})
    assert "apply them separately" in refusal(lambda: one + other, ModelError)


def test_a_document_that_cannot_be_replaced_stays_as_it_was(
    model: MemoryModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "edits.json"
    Intervention.parse("L0N0=0").save(saved, model)
    before = saved.read_bytes()

    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text[:20].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    edits = Intervention.parse("L1N1=3")
    assert "No space left on device" in refusal(lambda: edits.save(saved, model), SettingError)
    assert saved.read_bytes() == before and list(tmp_path.iterdir()) == [saved]


def test_a_line_break_in_a_document_is_shown_in_one_line() -> None:
    assert "unknown field `a⏎b`" in refusal(lambda: Intervention.from_json({"a\nb": 1}), SettingError)
