"""Known patterns are found again, on text the method was made with and on text it had not seen."""

from collections import defaultdict

from planted import MEMORIES, RANDOM_FROM, Planted

from memlens.index.reader import Index

KINDS = ("shallow", "semantic")


def found_ranks(index: Index) -> dict[str, dict[int, set[int]]]:
    """kind -> memory -> trigger ranks with a pattern of that kind."""
    found: dict[str, dict[int, set[int]]] = {kind: defaultdict(set) for kind in KINDS}
    for row in index.table("patterns").to_pylist():
        found[row["kind"]][row["layer"] * 20 + row["memory"]].update(row["prefixes"])
    return found


def rates(hits: int, false: int, missed: int) -> tuple[float, float]:
    return hits / (hits + false), hits / (hits + missed)


def test_classes_and_prefixes_of_either_kind_are_right_nine_times_in_ten(planted: tuple[Index, Planted]) -> None:
    found, truth = found_ranks(planted[0]), {"shallow": planted[1].shallow, "semantic": planted[1].semantic}
    pairs = [(bool(found[kind][m]), bool(truth[kind][m])) for kind in KINDS for m in range(MEMORIES)]
    right = [rates(pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True)))]
    for kind in KINDS:
        both = [(found[kind][m], truth[kind][m]) for m in range(MEMORIES)]
        own = [(f & t, f - t, t - f) for f, t in both]
        hits, false, missed = (sum(map(len, sets)) for sets in zip(*own, strict=True))
        right.append(rates(hits, false, missed))
    assert all(precision >= 0.9 and recall >= 0.9 for precision, recall in right), right


def test_random_triggers_get_at_most_one_pattern_in_twenty(planted: tuple[Index, Planted]) -> None:
    found = found_ranks(planted[0])
    named = [m for m in range(RANDOM_FROM, MEMORIES) if any(found[kind][m] for kind in KINDS)]
    assert len(named) <= 1


def test_patterns_are_grounded_and_described(planted: tuple[Index, Planted]) -> None:
    notes = planted[0].manifest.content["patterns"]
    assert notes["rate"] == 0.01 and notes["top"] == 25 and notes["families"]["two words at the end"] > 1000 * MEMORIES
    rows = planted[0].table("patterns").to_pylist()
    assert rows
    for row in rows:
        assert len(row["prefixes"]) >= 3 and row["prefixes"] == sorted(set(row["prefixes"]))
        assert 0 < row["confidence"] <= 1 and row["q"] <= 0.01
        assert row["description"].startswith(
            ("ends with", "ends in", "contains", "sentence begins with", "about: ", "before ")
        )


def test_every_memory_has_a_name_in_one_line(planted: tuple[Index, Planted]) -> None:
    rows = planted[0].table("names").to_pylist()
    assert len(rows) == MEMORIES
    for row in rows:
        assert "\n" not in row["name"] and row["covered"] <= row["triggers"] == 25
        assert (row["evidence"] is None) == row["name"].startswith(("no clear pattern", "partly "))
        assert row["patterns"] > 0 or row["evidence"] is None or 'before "' in row["name"]


def test_a_wording_in_some_prefixes_and_a_topic_in_others_are_two_senses(planted: tuple[Index, Planted]) -> None:
    hits = false = missed = 0
    for memory in range(34, 40):
        query = "SELECT sense, prefixes FROM {patterns} WHERE layer = $1 AND memory = $2"
        senses: dict[int, set[int]] = defaultdict(set)
        for row in planted[0].sql(query, [memory // 20, memory % 20]):
            senses[row["sense"]].update(row["prefixes"])
        for truth in (planted[1].shallow[memory], planted[1].semantic[memory]):
            found = max(senses.values(), key=lambda own: len(own & truth), default=set())
            hits, false, missed = hits + len(found & truth), false + len(found - truth), missed + len(truth - found)
    precision, recall = rates(hits, false, missed)
    assert precision >= 0.8 and recall >= 0.8, (precision, recall)
