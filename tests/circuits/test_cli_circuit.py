"""`memlens circuit` on the command line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from circuit_pairs import make_pairs

import memlens
from memlens.index.reader import Index
from memlens.tracer.intervention import Intervention

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def rows(tiny_gpt2: Path) -> list[dict[str, str]]:
    return [dict(vars(pair)) for pair in make_pairs(memlens.load(tiny_gpt2), 8)]


@pytest.fixture
def write_pairs(tmp_path: Path) -> Callable[[list[dict[str, str]]], Path]:
    def write(rows: list[dict[str, str]]) -> Path:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def test_it_prints_memories_by_layer_within_80_columns(
    run: Run, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("circuit", tiny_gpt2, "The river runs", "--nodes", 9)
    assert code == 0 and "layer 2" in out and "from" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_json_has_nodes_and_edges(run: Run, tiny_gpt2: Path) -> None:
    _, out, _ = run("circuit", tiny_gpt2, "The river runs", "--token", "d", "--against", "c", "--json", "--nodes", 5)
    document = json.loads(out)
    assert document["target"]["against"] == "c" and len([n for n in document["nodes"] if n["kind"] == "memory"]) == 5


def test_heads_are_printed_and_in_the_json(run: Run, tiny_gpt2: Path) -> None:
    command = ["circuit", tiny_gpt2, "The river runs", "--heads", "--nodes", 5]
    assert re.search(r"% by L\dH\d", run(*command)[1])
    assert all(edge["heads"] for edge in json.loads(run(*command, "--json")[1])["edges"])


def test_an_index_stands_for_its_model(run: Run, tiny_gpt2_index: Index) -> None:
    assert run("circuit", tiny_gpt2_index.folder, "The river runs", "--nodes", 3)[0] == 0


def test_graph_and_drawing_are_saved(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    saved = ["--save", tmp_path / "graph.json", "--svg", tmp_path / "graph.svg"]
    assert run("circuit", tiny_llama, "The river runs", "--gate", "half", *saved)[0] == 0
    assert json.loads((tmp_path / "graph.json").read_text(encoding="utf-8"))["metadata"]["prompt"] == "The river runs"
    assert (tmp_path / "graph.svg").read_text(encoding="utf-8").startswith("<svg ")


def test_the_circuit_of_a_task_is_printed_and_saved(
    run: Run, tiny_gpt2_values: Index, rows: Any, write_pairs: Any, tmp_path: Path
) -> None:
    edits = tmp_path / "edits.json"
    command = ["circuit", tiny_gpt2_values.folder, "--pairs", write_pairs(rows), "--steps", 2, "--save", edits]
    page = tmp_path / "page.html"
    code, out, _ = run(*command, "--report", page)
    assert code == 0 and "prefers the clean answer in 100% of 8 pairs" in out and "faithfulness" in out
    assert Intervention.load(edits).fingerprint is not None
    text = page.read_text(encoding="utf-8")
    named = [str(edit.memories[0]) for edit in Intervention.load(edits).edits]
    assert re.findall(r"<tr><td>(L\dN\d+)</td>", text) == named[:200] and text.count("<polyline") == 3
    assert not re.search(r"(src|href)=|url\(", text)  # nothing is loaded


def test_a_page_of_a_user_is_not_replaced(refused: Refused, tiny_gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>mine</p>", encoding="utf-8")
    told = refused("circuit", tiny_gpt2, "--pairs", tmp_path / "pairs.jsonl", "--report", tmp_path / "page.html")
    assert "was not made by memlens" in told


def test_the_circuit_of_a_task_as_json(run: Run, tiny_gpt2: Path, rows: Any, write_pairs: Any) -> None:
    _, out, _ = run("circuit", tiny_gpt2, "--pairs", write_pairs(rows), "--method", "relevance", "--refine", "--json")
    assert json.loads(out)["method"] == "relevance"


def test_held_out_pairs_are_read_from_a_file(run: Run, tiny_gpt2: Path, rows: Any, write_pairs: Any) -> None:
    command = ["circuit", tiny_gpt2, "--pairs", write_pairs(rows), "--held-out", write_pairs(rows), "--steps", 1]
    assert json.loads(run(*command, "--json")[1])["held_out"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name either a PROMPT or --pairs FILE"),
        (["b"], "the prompt has one token; a circuit needs at least two"),
        (["The river", "--token", "river boat"], "'river boat' is not one token of this model"),
        (["The river", "--nodes", "0"], "invalid value for '--nodes': 0 is less than 1"),
        (["The river", "--gate", "both"], "invalid value for '--gate': 'both' is not one of 'value', 'half'"),
        (["The river", "--steps", "3"], "--steps has no effect with a prompt"),
        (["The river", "--force"], "--force has no effect without --save or --svg or --report"),
        (["--pairs", "missing.jsonl"], "missing.jsonl"),
        (["--pairs", "missing.jsonl", "--token", "b"], "--token has no effect with --pairs"),
        (["The river", "--refine"], "--refine has no effect with a prompt"),
        (
            ["--pairs", "missing.jsonl", "--method", "x"],
            "--method is 'x'; choose one of: integrated, ablation, relevance, patching",
        ),
        (["--pairs", "missing.jsonl", "--steps", "0"], "--steps is 0; it must be 1 or more"),
        (["--pairs", "missing.jsonl", "--test", "1"], "--test is 1.0; it must be a share between 0 and 1"),
        (["--pairs", "a", "--held-out", "b", "--test", "0.2"], "--test has no effect with --held-out"),
        (["--pairs", "a", "--method", "patching", "--steps", "5"], "--steps has no effect with --method patching"),
        (["--pairs", "missing.jsonl", "--heads"], "--heads has no effect with --pairs"),
        (["The river", "--against", "river boat"], "'river boat' is not one token of this model"),
    ],
)
def test_bad_options_are_refused(refused: Refused, tiny_gpt2: Path, words: list[str], message: str) -> None:
    assert message in refused("circuit", tiny_gpt2, *words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clean_prefix": "b", "patch_prefix": "c"}, "pair 1: the clean prompt has one token"),
        ({"clean_prefix": "ccdfg"}, "pair 1: the clean prompt has 5 tokens and the patch prompt 4"),
        ({"clean_answer": "dg"}, "pair 1: the answer 'dg' is not one token of this model"),
        ({"clean_answer": ""}, "row 1: 'clean_answer' is missing"),
    ],
)
def test_bad_pairs_are_refused(
    refused: Refused, tiny_gpt2: Path, rows: Any, write_pairs: Any, changes: dict[str, str], message: str
) -> None:
    assert message in refused("circuit", tiny_gpt2, "--pairs", write_pairs([rows[0] | changes, *rows[1:]]))


def test_a_task_that_the_model_does_not_do_is_refused(
    refused: Refused, tiny_gpt2: Path, rows: Any, write_pairs: Any
) -> None:
    swapped = [row | {"clean_answer": row["patch_answer"], "patch_answer": row["clean_answer"]} for row in rows]
    assert "so it cannot do this task" in refused("circuit", tiny_gpt2, "--pairs", write_pairs(swapped))
