"""The export in Neuronpedia's layout: what it says of a memory is what the index says, and nothing is made up."""

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.cli import main
from memlens.index import export as neuronpedia
from memlens.index.export import FORMATS
from memlens.index.memory import read_value
from memlens.index.reader import Index, trigger_of
from memlens.memory import MemoryId, Trigger
from memlens.pattern.table import compute_patterns
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def index(tiny_llama_index: Index, tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = shutil.copytree(tiny_llama_index.folder, tmp_path_factory.mktemp("neuronpedia") / "index")
    return memlens.values(folder, top=12, threads=1)


def exported(index: Index) -> list[dict[str, Any]]:
    sink = io.BytesIO()
    count = FORMATS["neuronpedia"](index, sink)
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert len(lines) == count
    return lines


def test_every_memory_is_there_with_its_own_triggers(index: Index) -> None:
    lines = exported(index)
    names = [MemoryId(layer, memory) for layer in index.layers for memory in range(index.memories(layer))]
    assert [(line["layer"], line["index"]) for line in lines] == [(f"{n.layer}-memlens", str(n.memory)) for n in names]
    corpus = {row["sentence"]: row for row in index.table("corpus").to_pylist()}
    own: dict[MemoryId, list[Trigger]] = {name: [] for name in names}
    for row in index.table("triggers").to_pylist():
        if row["end"] == "top":
            trigger = trigger_of(row, corpus[row["sentence"]], index.vocabulary)
            own[MemoryId(row["layer"], row["memory"])].append(trigger)
    for name, line in zip(names, lines, strict=True):
        triggers = own[name]
        assert len(line["activations"]) == len(triggers)
        for trigger, told in zip(triggers, line["activations"], strict=True):
            place = told["maxValueTokenIndex"]
            assert "".join(told["tokens"]) == trigger.text + trigger.after[: sum(map(len, told["tokens"][place + 1 :]))]
            assert "".join(told["tokens"][: place + 1]) == trigger.text and told["tokens"][place] == trigger.token
            assert place == trigger.prefix.position == told["qualifyingTokenIndex"]
            assert told["maxValue"] == told["values"][place] == trigger.coefficient
            assert len(told["values"]) == len(told["tokens"]) and told["values"].count(0) == len(told["values"]) - 1
            assert told["binMin"] == triggers[-1].coefficient and told["binMax"] == triggers[0].coefficient


def test_statistics_and_both_ends_of_the_value_are_the_indexs(index: Index) -> None:

    for line in exported(index)[::17]:
        facts = index.facts(f"L{line['layer'].removesuffix('-memlens')}N{line['index']}")
        assert (line["maxActApprox"], line["frac_nonzero"]) == (facts.max, facts.frequency)
        heights, middles = line["freq_hist_data_bar_heights"], line["freq_hist_data_bar_values"]
        assert len(heights) == len(middles) and sum(heights) == sum(facts.histogram) and middles == sorted(middles)
        assert heights == [] or (heights[0] and heights[-1])
        value = read_value(index, facts.id)
        assert value is not None
        for end, told in ((value.promotes, "pos"), (value.demotes, "neg")):
            assert line[f"{told}_str"] == [one.text for one in end[:10]]
            wanted = [math.log(one.number * len(index.vocabulary)) for one in end[:10]]
            assert line[f"{told}_values"] == pytest.approx(wanted)
        assert all(line[field] == [] for field in neuronpedia._UNKNOWN) and line["explanations"] == []


def test_a_long_sentence_is_cut_around_the_trigger(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exported(index)
    shorter = neuronpedia._TRIGGERS.replace("position - 64", "position - 2").replace("+ 1 + 16", "+ 1 + 1")
    assert shorter.count("- 2,") == 1 and shorter.count("+ 1 + 1]") == 1
    monkeypatch.setattr(neuronpedia, "_TRIGGERS", shorter)
    for line, before in zip(exported(index), whole, strict=True):
        for told, had in zip(line["activations"], before["activations"], strict=True):
            place, first = had["maxValueTokenIndex"], max(had["maxValueTokenIndex"] - 2, 0)
            assert told["tokens"] == had["tokens"][first : place + 2]
            assert told["maxValueTokenIndex"] == place - first and told["maxValue"] == had["maxValue"]


def test_any_number_at_once_gives_the_same(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exported(index)
    monkeypatch.setattr(neuronpedia, "_BYTES_AT_ONCE", 1)
    assert exported(index) == whole


def test_bos_alone_and_a_name_from_patterns_have_their_place(tiny_text: Path, tmp_path: Path) -> None:
    model = memlens.load(tiny_model("gpt2", activation_function="relu"), tokenizer=tiny_tokenizer(adds_bos=True))
    index = memlens.scan(model, tiny_text, out=tmp_path / "index", preset="released", threads=1)
    told = [one for line in exported(index) for one in line["activations"]]
    alone = [one for one in told if one["tokens"][0] == "" and one["maxValueTokenIndex"] == 0]
    assert alone and all(one["values"][0] == one["maxValue"] > 0 for one in alone)
    compute_patterns(index)
    named = [line for line in exported(index) if line["explanations"]]
    assert named and all(line["explanations"][0]["description"] for line in named)


def test_the_command_writes_it(index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "features.jsonl"
    assert main(["export", str(index.folder), "--format", "neuronpedia", "-o", str(target)]) == 0
    assert [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()] == exported(index)
    assert "120 memories written" in capsys.readouterr().err
