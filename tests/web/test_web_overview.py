"""The page Overview and the data of the map."""

import base64
import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import memlens
from memlens.index.reader import Index
from memlens.memory import GroupShape, MemoryNames
from memlens.pattern.related import order_by_likeness
from memlens.role.table import ROLES_SCHEMA
from memlens.text import tail
from memlens.web.memory_map import CLASSES, NOTHING, Statistics, draw_map


def rows(index: Index, table: str) -> dict[tuple[int, int], dict[str, object]]:
    return {(row["layer"], row["memory"]): row for row in index.sql(f"SELECT * FROM {{{table}}}")}


def test_the_page_says_what_was_scanned(client: TestClient, index: Index) -> None:
    text = client.get("/").text
    assert f"{index.manifest.counts.prefixes:,} prefixes" in text
    assert text.count('href="/search?layers=') == len(index.layers)
    counts = client.get("/api/counts").json()
    assert counts["memories"] == sum(index.memories(layer) for layer in index.layers)
    assert counts["dead"] == sum(bool(row["dead"]) for row in rows(index, "memories").values())


def test_layers_are_those_of_ten_naive_lines(client: TestClient, index: Index) -> None:
    facts, values = rows(index, "memories"), rows(index, "values")
    of_prefixes = index.sql("SELECT layer, memory FROM {patterns} WHERE kind <> 'next'")
    patterns = {(row["layer"], row["memory"]) for row in of_prefixes}
    for layer in client.get("/api/layers").json():
        own = [key for key in facts if key[0] == layer["layer"]]
        assert layer["memories"] == len(own)
        assert layer["median_max"] == pytest.approx(float(np.median([facts[key]["max"] for key in own])))
        known = [values[key] for key in own if values[key]["target"] is not None]
        assert layer["agreement"] == pytest.approx(sum(row["argmax"] == row["target"] for row in known) / len(known))
        assert layer["with_pattern"] == pytest.approx(sum(key in patterns for key in own) / len(own))
        best = max(own, key=lambda key: (facts[key]["max"], -key[1]))
        assert layer["strongest"] == f"L{best[0]}N{best[1]}"


def test_every_memory_has_its_level_on_the_map(client: TestClient, index: Index) -> None:
    drawn = client.get("/api/map?by=max&room=4096").json()
    levels = base64.b64decode(drawn["levels"])
    facts = rows(index, "memories")
    assert drawn["memories"] is None and len(levels) == len(facts)
    values = np.array([facts[key]["max"] for key in sorted(facts)], np.float64)
    below = np.array([(values < value).mean() for value in values])
    assert np.abs(np.frombuffer(levels, np.uint8) / 254 - below).max() < 1 / 16  # 33 quantiles, interpolated


def test_classes_on_the_map_are_those_of_the_patterns(client: TestClient, index: Index) -> None:
    levels = base64.b64decode(client.get("/api/map?by=class").json()["levels"])
    kinds: dict[tuple[int, int], set[str]] = {}
    for row in index.sql("SELECT layer, memory, kind FROM {patterns} WHERE kind <> 'next'"):
        kinds.setdefault((row["layer"], row["memory"]), set()).add(row["kind"])
    expected = []
    for key in sorted(rows(index, "memories")):
        own = kinds.get(key, set())
        expected.append("both" if len(own) == 2 else next(iter(own), "none"))
    assert [CLASSES[level] for level in levels] == expected and len(set(expected)) > 1


@pytest.mark.parametrize("room", [1, 7, 13, 39])
def test_a_cell_of_several_memories_shows_the_highest(client: TestClient, room: int) -> None:
    whole = client.get("/api/map?by=frequency&room=4096").json()
    every = base64.b64decode(whole["levels"])
    binned = client.get(f"/api/map?by=frequency&room={room}").json()
    levels = base64.b64decode(binned["levels"])
    memories = np.frombuffer(base64.b64decode(binned["memories"]), "<u4")
    cell = first = 0
    for layer in binned["layers"]:
        own = every[first : first + layer["memories"]]
        for begin in range(0, len(own), layer["size"]):
            part = own[begin : begin + layer["size"]]
            assert levels[cell] == max(part) and own[memories[cell]] == max(part)
            assert begin <= memories[cell] < begin + layer["size"]
            cell += 1
        first += layer["memories"]
        assert -(-layer["memories"] // layer["size"]) <= room
    assert cell == len(levels)


def dense(layers: int, size: int) -> MemoryNames:
    return MemoryNames({layer: [GroupShape("dense", 1, size)] for layer in range(layers)})


def test_a_million_memories_fit_into_a_small_answer() -> None:
    many = 1_000_000
    statistics = Statistics(
        tuple(range(8)), dense(8, many // 8), np.arange(9) * (many // 8), {"max": np.random.default_rng(0).random(many)}
    )
    drawn = draw_map(statistics, "max", 5000)
    assert len(drawn.levels) < 60_000 and all(row.size == 25 for row in drawn.layers)


def test_colors_are_spread_evenly_over_a_few_large_and_many_small_numbers() -> None:
    numbers = np.exp(np.random.default_rng(0).normal(0, 3, 1000))  # as in gated models
    statistics = Statistics((0,), dense(1, 1000), np.array([0, 1000]), {"max": numbers})
    levels = np.frombuffer(base64.b64decode(draw_map(statistics, "max", 1000).levels), np.uint8)
    assert np.histogram(levels, 4, (0, 255))[0].min() > 200


def test_missing_and_extreme_numbers_have_levels() -> None:
    statistics = Statistics((0,), dense(1, 4), np.array([0, 4]), {"max_p": np.array([np.nan, 1e-4, 1e-2, 1.0])})
    levels = base64.b64decode(draw_map(statistics, "max_p", 9).levels)
    assert levels[0] == NOTHING and list(levels[1:]) == sorted(levels[1:]) and levels[3] == 254
    binned = base64.b64decode(draw_map(statistics, "max_p", 2).levels)
    assert binned[0] == levels[1] and binned[1] == levels[3]
    for column in ([0.0, 0.0], [3.0, 3.0], [np.nan, np.nan], [-1.0, -2.0], [0.0, np.inf]):
        for by in ("max", "max_p"):
            statistics = Statistics((0,), dense(1, 2), np.array([0, 2]), {by: np.array(column)})
            assert len(base64.b64decode(draw_map(statistics, by, 5).levels)) == 2


@pytest.mark.parametrize("sort", ["level", "class", "likeness"])
@pytest.mark.parametrize("room", [4096, 13])
def test_a_sorted_map_has_the_same_memories_in_another_order(
    client: TestClient, index: Index, sort: str, room: int
) -> None:
    plain = client.get("/api/map?by=max&room=4096").json()
    by_class = base64.b64decode(client.get("/api/map?by=class&room=4096").json()["levels"])
    every = base64.b64decode(plain["levels"])
    drawn = client.get(f"/api/map?by=max&room={room}&sort={sort}").json()
    levels = base64.b64decode(drawn["levels"])
    memories = np.frombuffer(base64.b64decode(drawn["memories"]), "<u4").tolist()
    first = cell = 0
    for layer in drawn["layers"]:
        own = list(every[first : first + layer["memories"]])
        kinds = list(by_class[first : first + layer["memories"]])
        order = {
            "level": sorted(range(len(own)), key=lambda memory: (-own[memory], memory)),
            "class": sorted(range(len(own)), key=lambda memory: (-kinds[memory], memory)),
            "likeness": order_by_likeness(index, layer["layer"]).tolist(),
        }[sort]
        for begin in range(0, len(own), layer["size"]):
            part = order[begin : begin + layer["size"]]
            assert memories[cell] == max(part, key=lambda memory: own[memory]) and levels[cell] == own[memories[cell]]
            cell += 1
        first += layer["memories"]
    assert cell == len(levels)
    assert client.get("/api/map?sort=beauty").status_code == 404


def test_roles_color_and_sort_the_map(own_index: Index, client_of: Callable[..., TestClient]) -> None:
    assert client_of(own_index).get("/api/map?by=role").status_code == 404
    names = ["prediction", None, "dead"]
    facts = sorted(rows(own_index, "memories"))
    made: list[dict[str, object]] = [
        {"layer": one, "memory": two, "role": names[two % 3], "roles": []} for one, two in facts
    ]
    own_index.write({"roles": (ROLES_SCHEMA, [pa.Table.from_pylist(made, ROLES_SCHEMA)])}, dict)
    opened = client_of(own_index)
    drawn = opened.get("/api/map?by=role&sort=role").json()
    memories = np.frombuffer(base64.b64decode(drawn["memories"]), "<u4")
    shown = [drawn["kinds"][level] for level in base64.b64decode(drawn["levels"])]
    assert shown == [names[memory % 3] or "no role" for memory in memories]
    assert shown[:40] == sorted(shown[:40], key=["prediction", "dead", "no role"].index)
    assert "sorted by" in opened.get("/?by=role&sort=role").text


def test_an_unknown_statistic_is_refused_with_one_line(client: TestClient) -> None:
    answer = client.get("/api/map?by=beauty")
    assert answer.status_code == 404 and "beauty" in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert client.get("/api/map?room=0").status_code == 422
    assert client.get("/?by=beauty").status_code == 200  # a page shows what it can


def test_a_memory_in_one_line(client: TestClient, index: Index) -> None:
    found = client.get("/api/brief/L1N3?by=mean").json()
    assert found["value"] == pytest.approx(index["L1N3"].mean) and found["summary"]
    assert client.get("/api/brief/L1N999").status_code == 404


def test_charts_have_the_published_curves_and_their_numbers(client: TestClient) -> None:
    sections = {section["name"]: section for section in client.get("/api/charts").json()}
    assert {"agreement", "rank"} <= set(sections)
    assert "the paper" in str(sections["agreement"]["charts"][0]["spec"])
    without = client.get("/?charts=yes").text
    assert sections["agreement"]["title"] in without and "<caption>the paper</caption>" in without


def test_an_index_fresh_from_a_scan_says_what_is_missing(
    own_index: Index, client_of: Callable[..., TestClient]
) -> None:
    later = [
        name for name in own_index.manifest.files if name.startswith(("values", "keys", "patterns", "names", "exp"))
    ]
    own_index.manifest.with_files({}, without=later).write(own_index.folder)
    bare = client_of(own_index)
    text = bare.get("/").text
    assert all(f"memlens {verb} {own_index.folder}" in text for verb in ("values", "patterns", "experiment"))
    assert bare.get("/api/charts").json() == []
    assert bare.get("/api/map?by=class").status_code == 404
    page = bare.get("/m/L0N1")
    assert page.status_code == 200 and f"memlens values {own_index.folder}" in page.text
    assert bare.get("/search?q=river&in=values").status_code == 409
    assert bare.get("/api/search?class=shallow").status_code == 409
    assert bare.get("/api/memories/L0N1/related").status_code == 200


def test_the_report_runs_in_a_sandbox(client_of: Callable[..., TestClient], own_index: Index) -> None:
    client = client_of(own_index.folder)
    assert client.get("/report").status_code == 404 and 'href="/report"' not in client.get("/").text
    memlens.report(own_index)
    answer = client.get("/report")
    assert answer.status_code == 200 and 'href="/report"' in client.get("/").text
    assert "sandbox allow-scripts allow-downloads; default-src 'none'" in answer.headers["content-security-policy"]
    assert "allow-same-origin" not in answer.headers["content-security-policy"]
    assert answer.headers["cross-origin-opener-policy"] == "unsafe-none"
    assert "sandbox" not in client.get("/").headers["content-security-policy"]
    named = re.findall(r'<a data-memory="([^"]*)" href="([^"]*)">', answer.text)
    assert named and all(address == f"/m/{name}" for name, address in named)
    assert client.get(named[0][1]).status_code == 200 and '<a data-home href="/">' in answer.text


def test_the_overview_lists_memories_to_read_first_and_a_random_one(client: TestClient, index: Index) -> None:
    worth = client.get("/api/worth-reading").json()
    assert 0 < len(worth) <= 6 and len({one["name"].split("N")[0] for one in worth}) == len(worth)
    scores = {}  # best sum of held-out AUROCs and agreement of each layer
    for row in index.sql("SELECT * FROM {patterns} p JOIN {names} n USING (layer, memory) WHERE auroc > 0.7"):
        score = row["auroc"] + (0.5 if row["auroc_same_token"] is None else row["auroc_same_token"])
        best = scores.setdefault((row["layer"], row["memory"]), [0.0, 0.25 * bool(row["agrees"]), row["triggers"]])
        best[0] = max(best[0], score)
    by_layer: dict[int, float] = {}
    for (layer, _), (score, agrees, triggers) in scores.items():
        if triggers >= 10:
            by_layer[layer] = max(by_layer.get(layer, 0.0), score + agrees)
    shown = [one["auroc"] + (one["auroc_same_token"] or 0.5) + 0.25 * one["agrees"] for one in worth]
    assert shown == pytest.approx(sorted(by_layer.values(), reverse=True)[:6])
    assert all(
        one["triggers"]
        == [[tail(trigger.before, 60), trigger.token] for trigger in index.triggers(one["name"], limit=3)]
        for one in worth
    )
    page = client.get("/").text
    assert all(f'href="/m/{one["name"]}"' in page for one in worth)
    for _ in range(5):
        found = client.get("/random", follow_redirects=False)
        assert found.status_code == 303 and not index[found.headers["location"].removeprefix("/m/")].dead
