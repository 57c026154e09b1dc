"""Comparing finds what looking at every pair of lists finds."""

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import memlens
from memlens.comparison import compare, overlap
from memlens.comparison.compare import IndexComparison, compare_indexes
from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.index.reader import Index, trigger_of
from memlens.memory import MemoryId, Trigger
from memlens.testing import tiny_model, tiny_tokenizer

Indexes = dict[str, Index]
Run = Callable[..., tuple[int, str, str]]
PAIRS = [("base", "tuned"), ("base", "moved"), ("gated", "gated tuned"), ("base", "base")]


def every_memory(index: Index) -> list[MemoryId]:
    return [MemoryId(layer, memory) for layer in index.layers for memory in range(index.memories(layer))]


def triggers_of(index: Index) -> dict[MemoryId, list[tuple[str, Trigger]]]:
    """(end, trigger) of every memory, worked out row by row."""
    corpus = {row["sentence"]: row for row in index.table("corpus").to_pylist()}
    found: dict[MemoryId, list[tuple[str, Trigger]]] = {name: [] for name in every_memory(index)}
    for row in index.table("triggers").to_pylist():
        trigger = trigger_of(row, corpus[row["sentence"]], index.vocabulary)
        found[MemoryId(row["layer"], row["memory"])].append((row["end"], trigger))
    return found


def naive_lists(index: Index, by: str, depth: int) -> dict[MemoryId, dict[Any, float]]:
    """Every memory's list; the first of equal keys counts."""
    found: dict[MemoryId, dict[Any, float]] = {name: {} for name in every_memory(index)}
    if by in ("prefixes", "endings"):
        for name, triggers in triggers_of(index).items():
            times: Counter[tuple[str, str]] = Counter()
            for end, trigger in triggers:
                times[end, trigger.token] += 1
                ending = (end, trigger.token, times[end, trigger.token])
                key = (end, trigger.text, trigger.prefix.position) if by == "prefixes" else ending
                found[name].setdefault(key, abs(trigger.coefficient))
        return found
    for row in index.table(by).to_pylist():
        own = found[MemoryId(row["layer"], row["memory"])]
        if by == "values":
            own.update(zip(row["tokens"][:depth], row["p"][:depth], strict=True))
        else:
            own[row["pattern"]] = row["confidence"]
    return found


def naive_overlap(a: dict[Any, float], b: dict[Any, float]) -> tuple[int, float, float]:
    both, union = a.keys() & b.keys(), a.keys() | b.keys()
    lesser = sum(min(a.get(key, 0), b.get(key, 0)) for key in union)
    greater = sum(max(a.get(key, 0), b.get(key, 0)) for key in union)
    return len(both), len(both) / len(union) if union else 1.0, lesser / greater if greater else 1.0


def measure_of(by: str, pair: tuple[str, str]) -> str:
    return by if by != "triggers" else "endings" if "moved" in pair else "prefixes"


@pytest.mark.parametrize("by", ["triggers", "values", "patterns"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_memories_of_one_name_are_compared_as_naively(indexes: Indexes, pair: tuple[str, str], by: str) -> None:
    a, b = (indexes[name] for name in pair)
    left, right = (naive_lists(index, measure_of(by, pair), 11 if a is b else 8) for index in (a, b))
    naive = {name: naive_overlap(left[name], right[name]) for name in left if left[name] or right[name]}
    order = sorted(naive, key=lambda name: (-(1 - naive[name][1]), round(naive[name][2], 9), name))
    found = compare_indexes(a, b, by=by, top=1000)
    assert [change.before.memory for change in found.changes] == order
    for change in found.changes:
        shared, jaccard, weighted = naive[change.before.memory]
        mine = {"prefixes": change.triggers, "endings": change.endings}.get(measure_of(by, pair))
        mine = mine or (change.values if by == "values" else change.patterns)
        assert mine is not None and change.before.memory == change.after.memory
        assert (mine.shared, mine.jaccard) == (shared, jaccard) and mine.weighted == pytest.approx(weighted)
        assert change.change == 1 - jaccard
    for layer in found.layers:
        own = [1 - naive[name][1] for name in naive if name.layer == layer.layer]
        assert (layer.memories, layer.matched) == (40, len(own))
        assert layer.mean_change == (pytest.approx(sum(own) / len(own)) if own else None)
        assert (layer.unchanged, layer.replaced) == (own.count(0), own.count(1))
    if (by == "triggers" and a is not b) or pair == ("base", "tuned"):
        assert any(0 < change.change < 1 for change in found.changes)
    if by == "values" and pair == ("base", "moved"):
        assert all(change.change == 0 for change in found.changes)  # one model


@pytest.mark.parametrize("by", ["triggers", "values", "patterns"])
@pytest.mark.parametrize(
    ("one", "other", "layers"), [("base", "base", (0, 2)), ("base", "tuned", (1, 1)), ("base", "base", (1, 1))]
)
def test_counterparts_are_the_best_of_all_pairs(
    indexes: Indexes, one: str, other: str, layers: tuple[int, int], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "_PAIRS_AT_ONCE", 97)  # many small parts
    a, b = indexes[one], indexes[other]
    left, right = (naive_lists(i, measure_of(by, ("", "")), 11 if a is b else 8) for i in (a, b))
    best: dict[int, tuple[float, int]] = {}
    for mine, theirs in product(range(40), range(40)):
        jaccard = naive_overlap(left[MemoryId(layers[0], mine)], right[MemoryId(layers[1], theirs)])
        if jaccard[0] and (a is not b or layers[0] != layers[1] or mine != theirs):
            best[mine] = max(best.get(mine, (0.0, 0)), (jaccard[1], -theirs))
    order = sorted(best, key=lambda mine: (best[mine][0], mine))
    found = compare_indexes(a, b, by=by, layers=layers, top=1000, alike=False)
    pairs = [(c.before.memory.memory, c.after.memory.memory, 1 - c.change) for c in found.changes]
    assert pairs == [(mine, -best[mine][1], pytest.approx(best[mine][0])) for mine in order]
    assert found.matched == len(best) > 0 and found.memories == 40
    alike = compare_indexes(a, b, by=by, layers=f"{layers[0]}:{layers[1]}", top=1).changes  # what is paired by likeness
    assert alike[0].change == pytest.approx(1 - max(jaccard for jaccard, _ in best.values()))


def test_tokens_of_two_vocabularies_are_compared_by_text(indexes: Indexes) -> None:
    a, b = indexes["base"], indexes["spaced"]
    assert a.vocabulary != b.vocabulary
    texts: list[dict[MemoryId, dict[str, float]]] = []
    for index in (a, b):
        texts.append({name: {} for name in every_memory(index)})
        for row in index.table("values").to_pylist():
            own = texts[-1][MemoryId(row["layer"], row["memory"])]
            for token, p in zip(row["tokens"][:8], row["p"][:8], strict=True):
                own.setdefault(index.vocabulary[token], p)
    found = compare_indexes(a, b, by="values", top=1000)
    for change in found.changes:
        name = change.before.memory
        shared, jaccard, weighted = naive_overlap(texts[0][name], texts[1][name])
        assert change.values is not None and change.values.shared == shared and change.change == 1 - jaccard
        assert change.values.weighted == pytest.approx(weighted)
    assert found.measure == "tokens" and any(change.change < 1 for change in found.changes)


def test_both_sides_are_what_the_indexes_say(indexes: Indexes) -> None:
    a, b = indexes["base"], indexes["tuned"]
    sides = {name: (change.before, change.after) for change in compare_indexes(a, b, top=120).changes
             for name in [change.before.memory]}  # fmt: skip
    for which, index in enumerate((a, b)):
        for name, triggers in triggers_of(index).items():
            first = [trigger for end, trigger in triggers if end == "top"][:3]
            assert sides[name][which].triggers == tuple((trigger.before, trigger.token) for trigger in first)
            assert sides[name][which].coefficient == (first[0].coefficient if first else None)
        for row in index.table("values").to_pylist():
            side = sides[MemoryId(row["layer"], row["memory"])][which]
            assert side.promotes == tuple(index.vocabulary[token] for token in row["tokens"][:8])
            assert side.max_p == row["max_p"]
        kinds: dict[MemoryId, set[str]] = {name: set() for name in sides}
        for row in index.table("patterns").to_pylist():
            kinds[MemoryId(row["layer"], row["memory"])].add(row["kind"])
        for name, own in kinds.items():
            assert sides[name][which].kind == ("both" if len(own) == 2 else own.pop() if own else "none")


def test_one_and_two_corpora_and_models_are_told_apart(indexes: Indexes) -> None:
    def facts(found: IndexComparison) -> tuple[bool, bool, str]:
        return found.same_model, found.same_corpus, found.measure

    assert facts(memlens.compare(indexes["base"].folder, indexes["tuned"].folder)) == (False, True, "prefixes")
    assert facts(memlens.compare(indexes["base"], indexes["moved"])) == (True, False, "endings")
    assert facts(memlens.compare(indexes["base"], indexes["base"], by="values")) == (True, True, "tokens")


def test_the_same_tables_give_the_same_result_in_any_cut(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare_indexes(indexes["gated"], indexes["gated tuned"], top=1000)
    monkeypatch.setattr(compare, "_MEMORIES_AT_ONCE", 7)
    assert compare_indexes(indexes["gated"], indexes["gated tuned"], top=1000) == whole
    assert json.loads(json.dumps(whole.to_json()))["changes"][0]["before"]["memory"].startswith("L")


def test_other_shapes_are_refused_unless_matched_by_counterpart(indexes: Indexes) -> None:
    with pytest.raises(SettingError, match=r"120 memories.*156 memories.*--layers 3:5"):
        compare_indexes(indexes["base"], indexes["wide"])
    found = compare_indexes(indexes["wide"], indexes["base"], layers="2:0")
    assert found.memories == 52 and 0 < found.matched <= 52


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"by": "keys"}, SettingError, "choose one of: triggers, values, patterns, roles"),
        ({"top": 0}, SettingError, "1 or more"),
        ({"layers": "3"}, SettingError, "like 3:5"),
        ({"layers": "1:-1"}, SettingError, "like 3:5"),
        ({"layers": "0:9"}, UnknownName, "layer 9 is not in this index"),
        ({"layers": (7, 0)}, UnknownName, "layer 7 is not in this index"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    indexes: Indexes, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        compare_indexes(indexes["base"], indexes["tuned"], **options)
    assert "\n" not in str(caught.value)


def test_what_an_index_lacks_is_named_with_the_command_that_makes_it(indexes: Indexes) -> None:
    for by in ("values", "patterns"):
        with pytest.raises(IndexFolderError, match=f"no table '{by}'; run `memlens {by} "):
            compare_indexes(indexes["base"], indexes["bare"], by=by)
    found = compare_indexes(indexes["base"], indexes["bare"], top=1).changes[0]
    assert found.values is None and found.patterns is None and found.after.kind is None
    with pytest.raises(SettingError, match=r"reading folded.*raw.*--reading"):
        compare_indexes(indexes["base"], indexes["raw"], by="values")


# On a command line


def ran(run: Run, *arguments: object) -> str:
    code, out, _ = run("compare", *arguments)
    assert code == 0
    return out


def test_it_prints_the_most_changed_memories_and_the_same_as_json(indexes: Indexes, run: Run) -> None:
    folders = indexes["base"].folder, indexes["tuned"].folder
    content, shown = json.loads(ran(run, *folders, "--json", "--top", 4)), ran(run, *folders, "--top", 4)
    assert len(content["changes"]) == 4 and content["memories"] == 120
    assert "one corpus" in shown and "two models" in shown
    lines = shown.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == [change["before"]["memory"] for change in content["changes"]]
    assert "\x1b" not in ran(run, *folders, "--top", 120)  # text of a corpus reaches no terminal as it is


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{base} {wide}", "--layers 3:5"),
        ("{base} nowhere", "there is no index folder nowhere"),
        ("{base}", "missing argument"),
        ("{base} {tuned} --by names", "--by is 'names'"),
        ("{base} {tuned} --layers a:b", "like 3:5"),
        ("{base} {bare} --by values", "memlens values"),
    ],
)
def test_bad_input_is_one_line(indexes: Indexes, refused: Callable[..., str], arguments: str, words: str) -> None:
    folders = {name: index.folder for name, index in indexes.items() if " " not in name}
    assert words in refused("compare", *(argument.format(**folders) for argument in arguments.split()))


def test_a_damaged_table_is_named(indexes: Indexes, refused: Callable[..., str], copy_of: Callable[..., Index]) -> None:
    copy = copy_of(indexes["tuned"]).folder
    (copy / "triggers.parquet").write_bytes(b"PAR1 no longer")
    assert "triggers.parquet is damaged" in refused("compare", indexes["base"].folder, copy)


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("by", ["triggers", "values", "patterns"])
def test_lines_fit_a_terminal_and_no_name_or_number_is_cut(
    indexes: Indexes, run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, by: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = indexes["base"].folder
    for order in ([], ["--alike"]):
        shown = ran(run, folder, folder, "--layers", "0:2", "--by", by, *order, "--top", 40)
        assert "compared" in shown and "0:2" in shown
        lines = shown.split("\n\n")[-1].splitlines()[1:]
        assert len(lines) > 5 and max(map(len, lines)) <= columns
        assert all(re.match(r"L0N\d+ → L2N\d+ +[\d.]+%", line) for line in lines), lines


def test_memories_that_changed_role_are_found(
    indexes: Indexes, copy_of: Callable[..., Index], run: Run, refused: Callable[..., str]
) -> None:
    model = memlens.load(tiny_model("gpt2", 0), tokenizer=tiny_tokenizer())
    few = memlens.roles(copy_of(indexes["base"], "few"), model=model, rate=1e-9)
    many = memlens.roles(copy_of(indexes["base"], "many"), model=model, rate=0.99)
    one, other = (
        {index.names.name(row["layer"], row["memory"]): set(row["roles"]) for row in index.table("roles").to_pylist()}
        for index in (few, many)
    )
    either = {name: one[name] | other[name] for name in one if one[name] | other[name]}
    naive = {name: 1 - len(one[name] & other[name]) / len(union) for name, union in either.items()}
    found = compare_indexes(few, many, by="roles", top=1000)
    assert any(naive.values()) and {change.before.memory: change.change for change in found.changes} == naive
    assert all(set(change.after.roles or ()) == other[change.after.memory] for change in found.changes)
    assert "no role" in run("compare", few.folder, many.folder, "--by", "roles")[1]
    assert "run `memlens roles" in refused("compare", few.folder, indexes["base"].folder, "--by", "roles")
