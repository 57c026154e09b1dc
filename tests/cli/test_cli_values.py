"""`values`, `search --in values` and the value's part of `show` say what the tables say."""

import json
import shutil
from pathlib import Path

import pytest
from cli_helpers import Paths, Run, checksums, is_refused
from safetensors.torch import load_file, save_file

import memlens
from memlens import text as cli_text
from memlens.index.reader import Index
from memlens.index.search import SearchQuery, search_values


def rows_of(folder: Path, table: str) -> list[dict]:
    return Index(folder).table(table).to_pylist()


def test_values_writes_what_the_library_writes(run: Run, plain: Path, valued: Path) -> None:
    ran = run("values", plain, "--top", 9, "--threads", 1)
    assert ran.code == 0
    assert checksums(plain) == checksums(valued)
    best = max(rows_of(valued, "values"), key=lambda row: row["max_p"])
    assert f"L{best['layer']}N{best['memory']}" in ran.out and "read folded, 9 tokens" in ran.out
    assert "memlens experiment" in ran.err


def test_values_as_json_has_the_most_confident_values_and_counts_agreement(run: Run, with_values: Path) -> None:
    answer = json.loads(run("values", with_values, "--top", 4, "--reading", "raw", "--threads", 1, "--json").out)
    rows, vocabulary = rows_of(with_values, "values"), Index(with_values).vocabulary
    assert (answer["reading"], answer["top"], answer["memories"]) == ("raw", 4, 120)
    assert answer["agree"] == sum(row["argmax"] == row["target"] for row in rows if row["target"] is not None)
    assert answer["with_target"] == sum(row["target"] is not None for row in rows)
    naive = sorted(rows, key=lambda row: (-row["max_p"], row["layer"], row["memory"]))[:10]
    assert [(value["layer"], value["memory"], value["text"], value["p"]) for value in answer["most_confident"]] == [
        (row["layer"], row["memory"], vocabulary[row["argmax"]], row["max_p"]) for row in naive
    ]
    assert {len(row["tokens"]) for row in rows} == {4}


def test_values_refuses_what_cannot_work_and_leaves_the_index(run: Run, with_values: Path) -> None:
    before = checksums(with_values)
    for option, given, *words in (
        ("--top", 0, "--top is 0"),
        ("--threads", 0, "--threads is 0"),
        ("--reading", "upside-down", "upside-down", "folded or raw"),
        ("--model", with_values / "none", "none"),
    ):
        assert is_refused(run("values", with_values, option, given), *words)
    assert checksums(with_values) == before


def test_a_model_folder_that_changed_since_the_scan_is_refused(run, models, text, tmp_path) -> None:
    folder = Path(shutil.copytree(models["plain"], tmp_path / "model"))
    memlens.scan(folder, text, out=tmp_path / "index", threads=1)
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.weight"][0, 0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert is_refused(run("values", tmp_path / "index"), "fingerprint differs", "--model")
    assert is_refused(run("experiment", tmp_path / "index", "local-edits"), "fingerprint differs", "--model")
    assert is_refused(run("analyze", folder, text, "-o", tmp_path / "index"), "another model", "--fresh")
    assert run("values", tmp_path / "index", "--model", models["plain"], "--quiet").code == 0


def test_show_has_both_ends_of_the_value_the_key_and_the_agreement(run: Run, valued: Path) -> None:
    vocabulary, keys = Index(valued).vocabulary, rows_of(valued, "keys")
    for row, key in list(zip(rows_of(valued, "values"), keys, strict=True))[::17]:
        value = json.loads(run("show", valued, f"L{row['layer']}N{row['memory']}", "--json").out)["value"]
        for end, tokens, p in (("promotes", "tokens", "p"), ("demotes", "bottom_tokens", "bottom_p")):
            assert [(entry["token"], entry["number"]) for entry in value[end]] == list(
                zip(row[tokens], row[p], strict=True)
            )
            assert all(entry["text"] == vocabulary[entry["token"]] for entry in value[end])
        matches = list(zip(key["tokens"], key["scores"], strict=True))
        assert [(entry["token"], entry["number"]) for entry in value["key"]] == matches
        assert value["target_rank"] == row["target_rank"]
        assert value["agrees"] is (None if row["target"] is None else row["target"] == row["argmax"])


def test_show_for_people_marks_agreement_and_lists_as_many_tokens_as_asked(run: Run, valued: Path) -> None:
    vocabulary = Index(valued).vocabulary
    signs = {True: "✓ agrees", False: "✗ ", None: "agreement is undefined"}
    rows = {None if row["target"] is None else row["target"] == row["argmax"]: row for row in rows_of(valued, "values")}
    for agrees, row in rows.items():
        out = run("show", valued, f"L{row['layer']}N{row['memory']}", "--top", 3).out
        assert signs[agrees] in out and "its key matches" in out
        promoted = [words.split("  ")[0] for words in out.split("promotes")[1].split("its key")[0].splitlines()[1:]]
        for place, shown in ((0, True), (2, True), (3, False)):
            assert (cli_text.quoted(vocabulary[row["tokens"][place]], 22) in promoted) is shown
    assert {True, False} <= rows.keys()  # the tiny model has both


def test_show_without_values_names_the_command(run: Run, made: Paths) -> None:
    ran = run("show", made["plain"], "L0N0")
    assert ran.code == 0 and f"memlens values {made['plain']}" in ran.err and "promotes" not in ran.out
    assert json.loads(run("show", made["plain"], "L0N0", "--json").out)["value"] is None


@pytest.mark.parametrize(
    ("queries", "option"),
    [
        ([" the"], None),
        ([" the", "e"], None),
        (["e"], "--substring"),
        (["in"], "--bottom"),
        (["e", " the"], "--bottom"),
    ],
)
def test_search_in_values_finds_what_the_library_finds(run, valued, queries, option) -> None:
    command = ["search", valued, *queries, "--in", "values", *([option] if option else [])]
    answer = json.loads(run(*command, "--limit", 1000, "--json").out)
    query = SearchQuery(tuple(queries), "values", bottom=option == "--bottom", limit=1000)
    found = search_values(Index(valued), query, "substring" if option == "--substring" else "word").found
    assert answer["total"] == len(found) > 0
    assert [
        (hit["name"], hit["p"], [(t["token"], t["text"], t["p"]) for t in hit["tokens"]]) for hit in answer["found"]
    ] == [(str(hit.name), hit.p, [(t.token, t.text, t.p) for t in hit.tokens]) for hit in found]
    people = run(*command, "--limit", 1)
    assert answer["found"][0]["name"] in people.out and len(people.out.splitlines()) == 2


def test_search_refuses_what_is_no_token_and_options_of_the_other_place(run: Run, valued: Path, made: Paths) -> None:
    in_values = ["--in", "values"]
    for query, options, *words in (
        ([" Paris"], in_values, "' Paris'", "' ' + 'Par' + 'is'", "substring"),
        (["Ω"], in_values, "'Ω'", "nor a sequence of tokens"),
        (["Ω"], [*in_values, "--substring"], "contains 'Ω'"),
        (["a"], [*in_values, "--ends"], "--ends", "--in triggers"),
        (["a"], ["--substring"], "--substring", "--in values"),
        (["a", "b"], [], "quotes"),
        (["a"], [*in_values, "--limit", 0], "--limit is 0"),
        ([""], in_values, "empty"),
    ):
        assert is_refused(run("search", valued, *query, *options), *words)
    assert is_refused(run("search", made["plain"], "a", *in_values), f"memlens values {made['plain']}")
