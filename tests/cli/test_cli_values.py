"""`values`, `search --in values` and the value's part of `show` say what the tables say."""

import json
import shutil
from pathlib import Path

import pytest
from cli_helpers import Run, checksums, is_refused
from safetensors.torch import load_file, save_file

import memlens
from memlens import text as cli_text
from memlens.index.reader import Index


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
    told = json.loads(run("values", with_values, "--top", 4, "--reading", "raw", "--threads", 1, "--json").out)
    rows, vocabulary = rows_of(with_values, "values"), Index(with_values).vocabulary
    assert (told["reading"], told["top"], told["memories"]) == ("raw", 4, 120)
    assert told["agree"] == sum(row["argmax"] == row["target"] for row in rows if row["target"] is not None)
    assert told["with_target"] == sum(row["target"] is not None for row in rows)
    naive = sorted(rows, key=lambda row: (-row["max_p"], row["layer"], row["memory"]))[:10]
    assert [(one["layer"], one["memory"], one["text"], one["p"]) for one in told["most_confident"]] == [
        (row["layer"], row["memory"], vocabulary[row["argmax"]], row["max_p"]) for row in naive
    ]
    assert {len(row["tokens"]) for row in rows} == {4}


def test_values_refuses_what_cannot_work_and_leaves_the_index(run: Run, with_values: Path) -> None:
    before = checksums(with_values)
    assert is_refused(run("values", with_values, "--top", 0), "--top is 0")
    assert is_refused(run("values", with_values, "--threads", 0), "--threads is 0")
    assert is_refused(run("values", with_values, "--reading", "upside-down"), "upside-down", "folded or raw")
    assert is_refused(run("values", with_values, "--model", with_values / "none"), "none")
    assert checksums(with_values) == before


def test_a_model_folder_that_changed_since_the_scan_is_refused(
    run: Run, models: dict[str, Path], text: Path, tmp_path: Path
) -> None:
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
        told = json.loads(run("show", valued, f"L{row['layer']}N{row['memory']}", "--json").out)["value"]
        for end, tokens, p in (("promotes", "tokens", "p"), ("demotes", "bottom_tokens", "bottom_p")):
            assert [(one["token"], one["number"]) for one in told[end]] == list(zip(row[tokens], row[p], strict=True))
            assert all(one["text"] == vocabulary[one["token"]] for one in told[end])
        matches = list(zip(key["tokens"], key["scores"], strict=True))
        assert [(one["token"], one["number"]) for one in told["key"]] == matches
        assert told["target_rank"] == row["target_rank"]
        assert told["agrees"] is (None if row["target"] is None else row["target"] == row["argmax"])


def test_show_for_people_marks_agreement_and_lists_as_many_tokens_as_asked(run: Run, valued: Path) -> None:
    rows, vocabulary = rows_of(valued, "values"), Index(valued).vocabulary
    signs = {True: "✓ agrees", False: "✗ ", None: "nothing follows its top trigger"}
    seen = set()
    for row in rows:
        agrees = None if row["target"] is None else row["target"] == row["argmax"]
        if agrees in seen:
            continue
        seen.add(agrees)
        out = run("show", valued, f"L{row['layer']}N{row['memory']}", "--top", 3).out
        assert signs[agrees] in out
        for place, shown in ((0, True), (2, True), (3, False)):
            line = f"{cli_text.quoted(vocabulary[row['tokens'][place]], 22)}"
            promoted = [words.split("  ")[0] for words in out.split("promotes")[1].split("its key")[0].splitlines()[1:]]
            assert (line in promoted) is shown
        assert "its key alone matches" in out
    assert {True, False} <= seen  # the tiny model has both


def test_show_without_values_names_the_command(run: Run, made: dict[str, Path]) -> None:
    ran = run("show", made["plain"], "L0N0")
    assert ran.code == 0 and f"memlens values {made['plain']}" in ran.err and "promotes" not in ran.out
    assert json.loads(run("show", made["plain"], "L0N0", "--json").out)["value"] is None


@pytest.mark.parametrize(
    ("queries", "options"),
    [([" the"], []), ([" the", "e"], []), (["e"], ["--substring"]), (["in"], ["--bottom"])],
)
def test_search_in_values_finds_what_a_naive_search_finds(
    run: Run, valued: Path, queries: list[str], options: list[str]
) -> None:
    vocabulary = Index(valued).vocabulary
    substring = "--substring" in options
    names = ("bottom_tokens", "bottom_p") if "--bottom" in options else ("tokens", "p")
    forms = {form for query in queries for form in (query, query if query.startswith(" ") else f" {query}")}
    naive = {}
    for row in rows_of(valued, "values"):
        found = [
            (token, p)
            for token, p in zip(row[names[0]], row[names[1]], strict=True)
            if (any(q in vocabulary[token] for q in queries) if substring else vocabulary[token] in forms)
        ]
        if found:
            naive[f"L{row['layer']}N{row['memory']}"] = found
    told = json.loads(run("search", valued, *queries, "--in", "values", *options, "--limit", 1000, "--json").out)
    assert told["total"] == len(naive) > 0
    assert {m["name"]: [(t["token"], t["p"]) for t in m["tokens"]] for m in told["found"]} == naive
    if len(queries) == 1 and not options:
        assert [m["p"] for m in told["found"]] == sorted((m["p"] for m in told["found"]), reverse=True)
    if len(queries) == 2:
        read = [{(t["text"].strip() == "the") for t in m["tokens"]} for m in told["found"]]
        assert [len(own) for own in read] == sorted(map(len, read), reverse=True)
    people = run("search", valued, *queries, "--in", "values", *options, "--limit", 1)
    assert told["found"][0]["name"] in people.out and len(people.out.splitlines()) == 2


def test_a_token_that_is_not_one_token_is_refused_with_its_split(run: Run, valued: Path) -> None:
    assert is_refused(run("search", valued, " Paris", "--in", "values"), "' Paris'", "' ' + 'Par' + 'is'", "substring")
    assert is_refused(run("search", valued, "Ω", "--in", "values"), "'Ω'", "nor made of several")
    assert is_refused(run("search", valued, "Ω", "--in", "values", "--substring"), "contains 'Ω'")


def test_search_refuses_options_of_the_other_place(run: Run, valued: Path, made: dict[str, Path]) -> None:
    assert is_refused(run("search", valued, "a", "--in", "values", "--ends"), "--ends", "--in triggers")
    assert is_refused(run("search", valued, "a", "--substring"), "--substring", "--in values")
    assert is_refused(run("search", valued, "a", "b"), "quotes")
    assert is_refused(run("search", valued, "a", "--in", "values", "--limit", 0), "--limit is 0")
    assert is_refused(run("search", valued, "", "--in", "values"), "empty")
    assert is_refused(run("search", made["plain"], "a", "--in", "values"), f"memlens values {made['plain']}")
