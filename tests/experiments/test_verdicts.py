"""People's verdicts on what the last layer changes: counted beside the hint, given on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.annotations.records import VERDICTS, Annotations, LastLayerChange, Verdict
from memlens.experiments.last_layer import summarize_verdicts
from memlens.experiments.run import EXPERIMENTS, is_made, is_outdated, run as run_experiment
from memlens.models.memory_model import MemoryModel

pytestmark = pytest.mark.parametrize("scanned", ["gpt2"], indirect=True)
LAST = EXPERIMENTS["last-layer"]
SAMPLE = 60
Judged = tuple[memlens.Index, MemoryModel, list[LastLayerChange]]


@pytest.fixture
def judged(fresh: tuple[memlens.Index, MemoryModel]) -> Judged:
    index, model = fresh
    rows = run_experiment(index, "last-layer", model, sample=SAMPLE)["last-layer"].to_pylist()
    examples = [LastLayerChange.of(row) for row in rows]
    assert len(examples) >= 4 and [example.name for example in examples] == [row["example"] for row in rows]
    return index, model, examples


def test_the_table_counts_what_people_say_now(judged: Judged) -> None:
    index, model, examples = judged
    by_person = {"ann": ("related", "distant", "distant"), "bob": ("related", "related", "distant")}
    assert not is_outdated(index, LAST) and is_made(index, LAST, sample=SAMPLE)
    notes = Annotations(index)
    for person, verdicts in by_person.items():
        for example, verdict in zip(examples, verdicts, strict=False):
            notes.save(Verdict(person, example, verdict))
    notes.save(Verdict("ann", examples[3], "related"))
    notes.undo(VERDICTS, "ann", examples[3].name)
    assert is_outdated(index, LAST) and not is_made(index, LAST, sample=SAMPLE)
    rows = run_experiment(index, "last-layer", model, sample=SAMPLE)["last-layer"].to_pylist()
    assert not is_outdated(index, LAST) and is_made(index, LAST, sample=SAMPLE)
    counted = [(row["related"], row["distant"]) for row in rows]
    assert counted[:3] == [(2, 0), (1, 1), (0, 2)] and set(counted[3:]) <= {(0, 0)}
    summary = summarize_verdicts(rows)
    assert summary is not None and (summary.related, summary.distant, summary.split) == (1, 1, 1)
    assert (summary.cosine_related, summary.cosine_distant) == (rows[0]["cosine"], rows[2]["cosine"])
    assert str(summary).startswith(f"people judged 3 of {len(rows)}: 1 distant, 1 related, 1 undecided; mean cosine")
    assert summarize_verdicts(rows[3:]) is None


def test_an_example_keeps_its_name_in_another_sample(judged: Judged) -> None:
    index, model, examples = judged
    notes = Annotations(index)
    notes.save(*(Verdict("ann", example, "distant") for example in examples))
    rows = run_experiment(index, "last-layer", model, sample=SAMPLE + 40)["last-layer"].to_pylist()
    names = {example.name for example in examples}
    assert names < {row["example"] for row in rows}  # a larger sample holds every smaller one
    assert {row["example"] for row in rows if row["distant"]} == names


def test_the_command_lists_judges_takes_back_and_exchanges(
    judged: Judged, tmp_path: Path, run: Callable[..., Any], refused: Callable[..., str]
) -> None:
    index, _, examples = judged
    begin, name = ("annotate", index.folder, "verdicts"), examples[1].name
    by_ann, whose = ("--annotator", "ann"), ("--annotator", "ann", "--example", name)
    for person, verdict in (("ann", "related"), ("bob", "distant")):
        assert run(*begin, "judge", "--annotator", person, "--example", name, "--verdict", verdict)[0] == 0
    listed = {row["example"]: row for row in json.loads(run(*begin, "list", *by_ann, "--json")[1])}
    assert [*listed] == [example.name for example in examples]
    assert listed[name]["verdict"] == "related" and listed[examples[0].name]["verdict"] is None
    assert "related" not in run(*begin)[1] and "distant" not in run(*begin)[1]  # nobody's verdict sways a reader
    status = {"annotator": "ann", "judged": 1, "examples": len(examples), "all": 1}
    assert json.loads(run(*begin, "status", "--json")[1])[0] == status
    for file in ("verdicts.csv", "verdicts.json"):
        assert run(*begin, "export", "--file", tmp_path / file)[0] == 0
    assert run(*begin, "import", "--file", tmp_path / "verdicts.json")[2] == "0 new events were imported\n"
    assert run(*begin, "undo", *whose)[2] == f"{name}: no verdict\n"
    for wrong in (
        ["praise"], ["judge"], ["judge", *by_ann], ["undo", *whose], ["judge", *whose],
        ["export", "--annotator", "eve"],
        ["judge", *by_ann, "--example", "nothing", "--verdict", "related"], ["judge", *whose, "--verdict", "near"],
        ["import", "--file", tmp_path / "nowhere.json"], ["export", "--file", index.folder / "x.json"],
    ):  # fmt: skip
        refused(*begin, *wrong)
    refused("annotate", index.folder, "status", "list")
