"""`search --in patterns` and what `show` says of patterns, against plain loops over the tables."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import Planted

from index_by_hand import write_index
from memlens.index.reader import Index

Run = Callable[..., tuple[int, str, str]]
first_corpus = pytest.mark.parametrize("planted", ["first"], indirect=True)


@pytest.fixture
def index(planted: tuple[Index, Planted]) -> Index:
    """Sixty memories with known patterns; only read it."""
    return planted[0]


def words_of(text: str) -> set[str]:
    return set(re.findall(r'[^\s",:]+', text.lower()))


def begins(said: str, query: str) -> bool:
    """Does every word of the query begin a word of what is said?"""
    return all(any(own.startswith(word) for own in words_of(said)) for word in words_of(query))


def naive_search(index: Index, query: str, substring: bool) -> list[tuple[str, int, str]]:
    """(memory, patterns that match, the surest of them), best first."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in index.table("patterns").to_pylist():
        said = f"{row['description']} {row['pattern']}"
        if query.lower() in said.lower() if substring else begins(said, query):
            found.setdefault((row["layer"], row["memory"]), []).append(row)

    def surest(row: dict[str, Any]) -> Any:
        return (-row["confidence"], -len(row["prefixes"]), row["pattern"])

    best = [(min(own, key=surest), len(own)) for own in found.values()]
    best.sort(key=lambda pair: (*surest(pair[0])[:2], pair[0]["layer"], pair[0]["memory"]))
    return [(f"L{row['layer']}N{row['memory']}", count, row["description"]) for row, count in best]


@first_corpus
@pytest.mark.parametrize(("query", "substring"), [("ends", False), ("ENDS wi", False), ("nd", True), ("in", True)])
def test_search_finds_what_looking_at_every_pattern_finds(run: Run, index: Index, query: str, substring: bool) -> None:
    options = ["--substring"] if substring else []
    told = json.loads(run("search", index.folder, query, "--in", "patterns", *options, "--limit", 999, "--json")[1])
    expected = naive_search(index, query, substring)
    assert [(m["name"], m["matches"], m["description"]) for m in told["found"]] == expected
    assert told["total"] == len(expected) > 0
    names = {f"L{row['layer']}N{row['memory']}": row["name"] for row in index.table("names").to_pylist()}
    assert all(match["summary"] == names[match["name"]] for match in told["found"])
    limited = run("search", index.folder, query, "--in", "patterns", *options, "--limit", 1)
    assert expected[0][0] in limited[1] and (len(expected) == 1 or "--limit" in limited[2])


@first_corpus
def test_every_word_of_each_pattern_leads_to_its_memory(run: Run, index: Index) -> None:
    for row in index.table("patterns").to_pylist()[:10]:
        told = json.loads(
            run("search", index.folder, row["description"], "--in", "patterns", "--limit", 999, "--json")[1]
        )
        assert f"L{row['layer']}N{row['memory']}" in {match["name"] for match in told["found"]}


@first_corpus
def test_what_cannot_be_searched_is_refused(
    run: Run, refused: Callable[..., str], index: Index, tmp_path: Path
) -> None:
    bare = write_index(tmp_path / "bare", ["the press"], {(0, 0): [(0, 1)]}).folder
    told = refused("search", bare, "river", "--in", "patterns")
    assert "no table 'patterns'" in told and "memlens patterns" in told
    for text, options, words in (
        ('" :', [], "no word"),
        ("x", ["--ends"], "--ends is for --in triggers"),
        ("x", ["--limit", 0], "--limit is 0"),
        ("x", ["--in", "names"], "triggers, values, patterns"),
    ):
        assert words in refused("search", index.folder, text, "--in", "patterns", *options)
    nothing = run("search", index.folder, "%{no} 'such' word", "--in", "patterns")
    assert nothing[:2] == (0, "") and "no memory has a pattern" in nothing[2]


@first_corpus
def test_show_names_the_patterns_and_marks_the_prefixes_that_contain_them(run: Run, index: Index) -> None:
    rows = index.table("patterns").to_pylist()
    most = max(rows, key=lambda row: sum(r["layer"] == row["layer"] and r["memory"] == row["memory"] for r in rows))
    name = f"L{most['layer']}N{most['memory']}"
    own = [row for row in rows if (row["layer"], row["memory"]) == (most["layer"], most["memory"])]
    own.sort(key=lambda row: (-row["confidence"], row["pattern"]))
    told = json.loads(run("show", index.folder, name, "--json")[1])
    assert [row["description"] for row in told["patterns"]] == [row["description"] for row in own]
    assert told["summary"]["covered"] == len({rank for row in own for rank in row["prefixes"]})
    out = run("show", index.folder, name, "--top", 25)[1]
    assert told["summary"]["name"] in out and "triggers covered" in out
    lines = out[out.index("top triggers") :].splitlines()[2:]
    for rank in range(told["summary"]["triggers"]):
        letters = "".join("abcdefgh"[i] for i, row in enumerate(own) if rank in row["prefixes"])
        cells = lines[rank].split()
        assert cells[0] == str(rank) and (cells[2] == letters if letters else cells[2] not in ("a", "b", "ab"))
    related = told["related"]
    assert related and all(f"\n{one['name']} " in out for one in related[:5])


def test_show_says_which_command_finds_patterns(run: Run, tmp_path: Path) -> None:
    bare = write_index(tmp_path / "bare", ["the press"], {(0, 0): [(0, 1)]}).folder
    code, _, err = run("show", bare, "L0N0")
    assert code == 0 and f"memlens patterns {bare}" in err
    told = json.loads(run("show", bare, "L0N0", "--json")[1])
    assert told["patterns"] is told["summary"] is told["related"] is None
