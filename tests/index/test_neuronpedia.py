"""The export has the fields that Neuronpedia's tools write, and the coefficients that the model computes."""

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memlens
from memlens.index import neuronpedia
from memlens.index.memory import read_value
from memlens.index.neuronpedia import export_neuronpedia
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.pattern.table import compute_patterns
from memlens.testing import tiny_model, tiny_tokenizer

# Fields of Neuronpedia's own converter (hijohnnylin/neuronpedia, utils/neuronpedia-utils/neuronpedia_utils/db_models),
# without its times, which the database fills; sourceSetName is from its export-data.py.
FEATURE = """modelId layer index creatorId maxActApprox hasVector vector vectorLabel vectorDefaultSteerStrength hookName
topkCosSimIndices topkCosSimValues neuron_alignment_indices neuron_alignment_values neuron_alignment_l1
correlated_neurons_indices correlated_neurons_pearson correlated_neurons_l1 correlated_features_indices
correlated_features_pearson correlated_features_l1 neg_str neg_values pos_str pos_values frac_nonzero
freq_hist_data_bar_heights freq_hist_data_bar_values logits_hist_data_bar_heights logits_hist_data_bar_values
decoder_weights_dist sourceSetName"""
ACTIVATION = """id tokens index layer modelId maxValue maxValueTokenIndex minValue values creatorId dataSource dataIndex
dfaValues dfaTargetIndex dfaMaxValue lossValues logitContributions binMin binMax binContains
qualifyingTokenIndex"""
EXPLANATION = """id modelId layer index description authorId embedding triggeredById typeName explanationModelName
notes"""
# Required and optional fields of the four records of a source.
RECORDS = {
    "model": ("id instruct creatorId", "displayNameShort displayName dimension visibility inferenceEnabled layers "
              "neuronsPerLayer"),
    "source": ("id modelId setName creatorId", "hasDashboards inferenceEnabled visibility num_prompts notes"),
    "sourceset": ("modelId name creatorId", "visibility description creatorName releaseName"),
    "release": ("name description creatorName creatorId", "visibility descriptionShort creatorNameShort"),
}  # fmt: skip
# SAEDashboard 0.8.0, NeuronpediaDashboardFeature.to_dict, what its converter does not rename
DASHBOARD = """neuron_alignment_indices neuron_alignment_values neuron_alignment_l1 correlated_neurons_indices
correlated_neurons_l1 correlated_neurons_pearson correlated_features_indices correlated_features_l1
correlated_features_pearson neg_str neg_values pos_str pos_values frac_nonzero freq_hist_data_bar_values
freq_hist_data_bar_heights logits_hist_data_bar_heights logits_hist_data_bar_values decoder_weights_dist
vector"""


@pytest.fixture(scope="module")
def index(tiny_llama_index: Index, tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = shutil.copytree(tiny_llama_index.folder, tmp_path_factory.mktemp("neuronpedia") / "index")
    memlens.values(folder, top=12, threads=1)
    opened = memlens.open_index(folder)
    compute_patterns(opened)
    return opened


@pytest.fixture(scope="module")
def folder(index: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert export_neuronpedia(index, out, index.load_model(), top=5) == 120
    return out / "llama"


def lines(folder: Path, kind: str, layer: int) -> list[dict[str, Any]]:
    files = sorted((folder / f"{layer}-memlens" / kind).iterdir(), key=lambda one: int(one.name[6:-9]))
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def run_sentence(index: Index, model: MemoryModel, sentence: int) -> dict[int, torch.Tensor]:
    """Return {layer: coefficients [BOS and tokens, memories]} of a sentence fed by itself; zeros if there is no BOS."""
    bos = index.manifest.model.bos
    tokens = [*([] if bos is None else [bos]), *index.sentences([sentence])[sentence]["tokens"]]
    with model.record(states=False) as recording:
        model.run_body(torch.tensor([tokens]))
    zeros = 1 if bos is None else 0
    return {layer: torch.nn.functional.pad(m[0], (0, 0, zeros, 0)) for layer, m in recording.coefficients.items()}


def check_values(index: Index, model: MemoryModel, folder: Path, top: int) -> None:
    alone = {sentence: run_sentence(index, model, sentence) for sentence in range(index.manifest.counts.sentences)}
    for layer in index.layers:
        records = iter(lines(folder, "activations", layer))
        for memory in range(index.memories(layer)):
            triggers = index.triggers(index.names.name(layer, memory), limit=top)
            for trigger in triggers:
                line, position = next(records), trigger.prefix.position
                first = -1 if position < 0 else max(position - 64, 0)
                along = alone[trigger.prefix.sentence][layer][first + 1 : position + 18, memory].tolist()
                assert line["values"] == pytest.approx(along, rel=1e-3, abs=1e-5)
                assert line["maxValue"] == max(line["values"]) == line["values"][line["maxValueTokenIndex"]]
                assert line["minValue"] == min(line["values"]) and line["index"] == str(memory)
                place = line["qualifyingTokenIndex"]
                assert line["values"][place] == pytest.approx(trigger.coefficient, rel=6e-4)
                assert len(line["tokens"]) == len(line["values"]) and line["tokens"][place] == trigger.token
                assert (trigger.text + trigger.after).startswith("".join(line["tokens"]))
                assert (line["binMin"], line["binMax"], line["binContains"]) == (-1, triggers[0].coefficient, -1)
        assert next(records, None) is None


def test_every_token_has_the_coefficient_that_the_model_gives_it(index: Index, folder: Path) -> None:
    check_values(index, index.load_model(), folder, 5)


def test_experts_are_counted_through_and_are_zero_where_no_router_sends_a_token(
    tiny_text: Path, tmp_path: Path
) -> None:
    model = memlens.load(tiny_model("mixtral"), tokenizer=tiny_tokenizer())
    index = memlens.scan(model, tiny_text, out=tmp_path / "index", top=3, threads=1)
    export_neuronpedia(index, tmp_path / "out", model)
    (folder,) = [one for one in (tmp_path / "out").iterdir() if one.is_dir()]
    check_values(index, model, folder, 20)
    assert any(0 in line["values"] for line in lines(folder, "activations", 0))


def test_bos_alone_has_its_place(tiny_text: Path, tmp_path: Path) -> None:
    model = memlens.load(tiny_model("gpt2", activation_function="relu"), tokenizer=tiny_tokenizer(adds_bos=True))
    index = memlens.scan(model, tiny_text, out=tmp_path / "index", preset="released", threads=1)
    export_neuronpedia(index, tmp_path / "out", model)
    (folder,) = [one for one in (tmp_path / "out").iterdir() if one.is_dir()]
    check_values(index, model, folder, 20)
    alone = [one for one in lines(folder, "activations", 0) if one["tokens"][0] == ""]
    assert alone and all(one["qualifyingTokenIndex"] == 0 for one in alone)


def test_fields_are_those_of_neuronpedias_own_tools(index: Index, folder: Path) -> None:
    assert set(DASHBOARD.split()) <= set(FEATURE.split())
    for layer in index.layers:
        for kind, fields in (("features", FEATURE), ("activations", ACTIVATION), ("explanations", EXPLANATION)):
            found = lines(folder, kind, layer)
            assert found and all(line.keys() == set(fields.split()) for line in found), kind
            whose = {(line["modelId"], line["layer"]) for line in found}
            assert whose == {("llama", f"{layer}-memlens")}
        for name, (needed, more) in RECORDS.items():
            record = json.loads((folder / f"{layer}-memlens" / f"{name}.jsonl").read_text())
            assert set(needed.split()) <= record.keys() <= set(f"{needed} {more}".split()), name
    ids = [line["id"] for layer in index.layers for line in lines(folder, "activations", layer)]
    assert len(set(ids)) == len(ids)


def test_statistics_both_ends_and_names_are_the_indexs(index: Index, folder: Path) -> None:
    for layer in index.layers:
        features = lines(folder, "features", layer)
        assert [line["index"] for line in features] == [str(number) for number in range(index.memories(layer))]
        for line in features[::7]:
            facts = index[index.names.name(layer, int(line["index"]))]
            assert (line["maxActApprox"], line["frac_nonzero"]) == (facts.max, facts.frequency)
            heights, middles = line["freq_hist_data_bar_heights"], line["freq_hist_data_bar_values"]
            assert len(heights) == len(middles) and sum(heights) == sum(facts.histogram) and middles == sorted(middles)
            assert heights == [] or (heights[0] and heights[-1])
            value = read_value(index, facts.name)
            assert value is not None
            for end, sign in ((value.promotes, "pos"), (value.demotes, "neg")):
                assert line[f"{sign}_str"] == [one.text for one in end[:10]]
                wanted = [math.log(one.number * len(index.vocabulary)) for one in end[:10]]
                assert line[f"{sign}_values"] == pytest.approx(wanted)
            assert all(line[field] == [] for field in neuronpedia._UNKNOWN)
        names = {row["memory"]: row["name"] for row in index.table("names").to_pylist() if row["layer"] == layer}
        assert {int(one["index"]): one["description"] for one in lines(folder, "explanations", layer)} == names


def test_a_long_sentence_is_cut_around_the_trigger(
    index: Index, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = neuronpedia._TRIGGERS.replace("position - 64", "position - 2").replace("+ 1 + 16", "+ 1 + 1")
    monkeypatch.setattr(neuronpedia, "_TRIGGERS", shorter)
    export_neuronpedia(index, tmp_path / "out", index.load_model(), top=5)
    for layer in index.layers:
        short, whole = (lines(one, "activations", layer) for one in (tmp_path / "out" / "llama", folder))
        for cut, whole_line in zip(short, whole, strict=True):
            place, first = whole_line["qualifyingTokenIndex"], max(whole_line["qualifyingTokenIndex"] - 2, 0)
            assert cut["tokens"] == whole_line["tokens"][first : place + 2]
            assert cut["values"] == pytest.approx(whole_line["values"][first : place + 2], rel=2e-3)
            assert cut["qualifyingTokenIndex"] == place - first


def test_the_same_index_gives_the_same_bytes_in_files_of_any_size(
    index: Index, folder: Path, tmp_path: Path, run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("export", index.folder, "--format", "neuronpedia", "-o", tmp_path / "out", "--top", "5")
    assert run(*arguments)[0] == 0
    assert contents(tmp_path / "out" / "llama") == contents(folder)
    monkeypatch.setattr(neuronpedia, "_MEMORIES_PER_FILE", 7)
    code, out, err = run(*arguments)  # takes the place of its own
    assert (code, out) == (0, f"{tmp_path / 'out'}\n") and "120 memories in 3 sources" in err
    for layer in index.layers:
        for kind in ("features", "activations", "explanations"):
            assert lines(tmp_path / "out" / "llama", kind, layer) == lines(folder, kind, layer)
    monkeypatch.undo()
    assert run(*arguments)[0] == 0
    assert contents(tmp_path / "out" / "llama") == contents(folder), "files of the larger export are gone"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_cannot_be_written_is_refused(
    index: Index, tiny_gpt2: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    own = ("export", index.folder, "--format", "neuronpedia")
    assert "name the folder with -o" in refused(*own)
    assert "fingerprint" in refused(*own, "-o", tmp_path / "out", "--model", tiny_gpt2)
    assert "0 is less than 1" in refused(*own, "-o", tmp_path / "out", "--top", "0")
    assert "leave it out" in refused("export", index.folder, "--format", "csv", "--model", "bundled")
    (tmp_path / "mine" / "llama").mkdir(parents=True)
    (tmp_path / "mine" / "llama" / "diary.txt").write_text("mine")
    assert "not made by memlens" in refused(*own, "-o", tmp_path / "mine", "--force")
    assert (tmp_path / "mine" / "llama" / "diary.txt").read_text() == "mine"
