"""Everything on a page is also available as JSON and from a command, with the same numbers."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from own_server import without_labels

from memlens.index.reader import Index
from memlens.text import cell, probability, signed, visible
from memlens.web.rendering import PAGES

Run = Callable[..., tuple[int, str, str]]
PROMPT = "The river runs to the"
COVERED = {"/", "/search", "/trace", "/circuit", "/steer", "/collections", "/annotate", "/compare"}


def text_of(html: str) -> str:
    """A page as it reads, spaces made equal."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def found(pattern: str, html: str) -> list[str]:
    return [unescape(one) for one in re.findall(pattern, html, re.DOTALL)]


def command(run: Run, *words: Any) -> Any:
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_every_page_in_the_header_is_covered_here() -> None:
    assert {address for address, _ in PAGES} == COVERED


def test_the_overview(client: TestClient, index: Index) -> None:
    html = client.get("/").text
    counts = client.get("/api/counts").json()
    tiles = dict(re.findall(r"<dt>([\w ]+)</dt><dd[^>]*>(?:<a[^>]*>)?([^<]*)", html))
    for name, of in (
        ("layers", "layers"),
        ("memories", "memories"),
        ("dead", "dead"),
        ("tokens scanned", "tokens"),
    ):
        assert tiles[name] == cell(counts[of])
    for layer in client.get("/api/layers").json():
        row = re.search(rf'<tr><th scope="row"[^>]*><a[^>]*>{layer["layer"]}</a></th>(.*?)</tr>', html, re.DOTALL)
        assert row is not None
        shown = found(r"<td[^>]*>(?:<a[^>]*>)?(.*?)(?:</a>)?</td>", row[1])
        numbers = [cell(layer[name]) for name in ("memories", "dead", "median_max")]
        shares = [probability(layer[name]) for name in ("mean_frequency", "median_max_p", "agreement", "with_pattern")]
        assert shown == [*numbers, *shares, layer["strongest"]]
    worth = client.get("/api/worth-reading").json()
    assert found(r'<li class="card"><a class="memory" href="/m/(\w+)"', html) == [one["name"] for one in worth]


@pytest.mark.parametrize("name", ["L0N3", "L1N7", "L2N39"])
def test_a_memory(client: TestClient, index: Index, run: Run, name: str) -> None:
    html = client.get(f"/m/{name}?related=yes").text
    shown = command(run, "show", index.folder, name)
    assert shown.pop("related") == client.get(f"/api/memories/{name}/related?limit=20").json()
    assert client.get(f"/api/memories/{name}").json() == shown | {"labels": [], "unfinished": None}
    facts = dict(re.findall(r"<div[^>]*><dt>([\w ]+)</dt><dd>([^<]*)", html))
    assert [facts[one] for one in ("max", "mean", "min")] == [cell(shown[n]) for n in ("max", "mean", "min")]
    assert facts["active on"] == probability(shown["frequency"])
    assert facts["max p"] == probability(shown["value"]["max_p"])
    assert facts["max p over uniform"] == f"{shown['value']['times_uniform']:.2f}"
    assert ("no clearer than those of a random direction" in html) == (shown["value"]["coherence"] < 0.99)
    top = shown["triggers"]["top"]
    assert found(r'class="coefficient" style="[^"]*">([^<]*)<', html) == [cell(one["coefficient"]) for one in top]
    assert [json.loads(one) for one in found(r"data-copy='([^']*)'", html)] == [
        one["before"] + one["token"] for one in top
    ]
    ends = [shown["value"]["promotes"][:15], shown["value"]["demotes"][:15]]
    scores = [f"{one['score']:+.2f}".replace("-", "−") for end in ends for one in end]
    assert found(r'<span class="n" title="p [^"]*">([^<]*)</span>', html) == scores
    bars = found(r"<title>[^<]*: ([\d,]+) of [\d,]+ tokens</title>", html)
    assert bars == [f"{count:,}" for count in shown["value"]["histogram"]]
    for pattern in shown["patterns"]:
        assert visible(pattern["description"]) in unescape(html)
    table = re.search(r'<details class="scores">.*?<tbody>(.*?)</tbody>', html, re.DOTALL)
    rows = found(r"<tr>(.*?)</tr>", table[1]) if table else []
    assert len(rows) == len(shown["patterns"])
    for row, pattern in zip(rows, shown["patterns"], strict=True):
        cells = found(r'<td class="right">(.*?)</td>', row)
        aurocs = ["–" if pattern[one] is None else f"{pattern[one]:.2f}" for one in ("auroc", "auroc_same_token")]
        numbers = [str(pattern["sense"] + 1), str(len(pattern["prefixes"]))]
        assert cells == [*numbers, *aurocs, f"{pattern['q']:.1e}"]
    related = client.get(f"/api/memories/{name}/related").json()
    assert found(r'<tr><td><a class="memory" href="/m/(\w+)"', html) == [one["name"] for one in related]


def test_coefficients_on_a_text_and_nearest_memories(
    client: TestClient, index: Index, run: Run, model_folder: Path
) -> None:
    """The page shows what these addresses answer, nothing of its own."""
    shown = command(run, "show", index.folder, "L1N7", "--on", PROMPT, "--model", model_folder)
    answer = client.get("/api/memories/L1N7/on", params={"text": PROMPT}).json()
    assert answer["tokens"] == shown["tokens"]
    assert answer["coefficients"] == pytest.approx(shown["coefficients"], abs=1e-6)
    shown = command(run, "show", index.folder, "L1N7", "--nearest", "--top", "8", "--model", model_folder)
    for side in ("key", "value"):
        answer = client.get("/api/memories/L1N7/nearest", params={"by": side, "limit": 8}).json()
        assert [one["name"] for one in answer] == [one["name"] for one in shown[side]]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"q": "river"}, ["river"]),
        ({"q": "the", "in": "values"}, ["the", "--in", "values"]),
        ({"q": "ends", "in": "patterns"}, ["ends", "--in", "patterns"]),
        ({"order": "max_p", "layers": "1-2"}, ["--order", "max_p", "--layers", "1-2"]),
    ],
)
def test_a_search(client: TestClient, index: Index, run: Run, asked: dict[str, str], words: list[str]) -> None:
    shown = command(run, "search", index.folder, *words)
    assert client.get("/api/search", params=asked).json() == shown
    html = client.get("/search", params=asked).text
    assert found(r'<span class="memory">(\w+)</span>', html) == [one["name"] for one in shown["found"]]


def test_what_fires_on_a_text(client: TestClient, index: Index, run: Run, model_folder: Path) -> None:
    shown = command(run, "search", index.folder, PROMPT, "--in", "fires", "--model", model_folder)
    answer = client.get("/api/fires", params={"text": PROMPT}).json()
    assert [one["name"] for one in answer["found"]] == [one["name"] for one in shown["found"]]
    html = client.get("/search", params={"q": PROMPT, "in": "fires"}).text
    reasons = [f"{100 * one['relative']:.0f}% of its range" for one in answer["found"]]
    assert [one.split(",")[0] for one in found(r'class="why[^"]*">([^<]*)<', html)] == reasons


def test_token_change(client: TestClient, index: Index, run: Run, model_folder: Path) -> None:
    shown = command(run, "show", index.folder, "L1N7", "--effect", "--top", "10", "--model", model_folder)
    assert shown == client.get("/api/memories/L1N7/effect").json()
    assert client.get("/api/memories/L9N9/effect").status_code == 404
    assert "--effect" in client.get("/m/L1N7").text


def test_wires(client: TestClient, index: Index, run: Run, model_folder: Path) -> None:
    shown = command(run, "show", index.folder, "L1N7", "--wires", "--top", "8", "--model", model_folder)
    answer = client.get("/api/memories/L1N7/wires").json()
    assert shown == command(run, "wires", index.folder, "L1N7", "--top", "8", "--model", model_folder)
    for kind in ("reads", "feeds"):
        assert [wire["memory"] for wire in answer[kind]] == [wire["memory"] for wire in shown[kind]]
        assert [wire["z"] for wire in answer[kind]] == pytest.approx([wire["z"] for wire in shown[kind]], abs=1e-4)
    assert "memlens wires" in client.get("/m/L1N7").text


def test_a_circuit(client: TestClient, index: Index, run: Run, model_folder: Path) -> None:
    shown = command(run, "circuit", index.folder, PROMPT, "--model", model_folder, "--nodes", 6)
    answer = client.get("/api/circuit", params={"prompt": PROMPT, "nodes": 6}).json()
    assert [node["id"] for node in answer["nodes"]] == [node["id"] for node in shown["nodes"]]
    assert [edge["weight"] for edge in answer["edges"]] == pytest.approx(
        [edge["weight"] for edge in shown["edges"]], abs=1e-5
    )
    html = client.get("/circuit", params={"prompt": PROMPT, "nodes": 6}).text  # its script draws the JSON
    assert PROMPT in html and 'name="nodes" type="number" min="1" max="200" value="6"' in html


def test_a_trace(client: TestClient, index: Index, run: Run, model_folder: Path) -> None:
    shown = command(run, "trace", index.folder, PROMPT, "--model", model_folder)
    answer = client.get("/api/trace/answer", params={"prompt": PROMPT}).json()
    assert answer["logit"] == pytest.approx(shown["logit"], abs=1e-5) and answer["rank"] == shown["rank"]
    assert answer["parts"] == pytest.approx(shown["parts"], abs=1e-4)
    html = client.get("/trace", params={"prompt": PROMPT, "layer": 1, "at": -1}).text
    layer = answer["layers"][1]
    effects = [signed(entry["effect"], 3) for entry in layer["by_effect"]]
    numbers = [float(entry.replace("−", "-")) for entry in found(r'<td class="right">([^<]*)</td>', html)]
    parts = [value for value in answer["parts"].values() if value]
    assert numbers[: len(parts) + 1] == pytest.approx([*parts, answer["logit"]], abs=6e-4)
    strongest = html[html.index('<ol class="strongest">') : html.index("</ol>", html.index('<ol class="strongest">'))]
    every = sorted(
        (entry for own in answer["layers"] for entry in own["by_effect"]), key=lambda entry: -abs(entry["effect"])
    )
    named = [f"{entry['memory']} {signed(entry['effect'], 3)}" for entry in every]
    of_page = zip(found(r">(L\d+N\d+)<", strongest), found(r'<span class="n">([^<]*)<', strongest), strict=True)
    pairs = [" ".join(pair) for pair in of_page]
    assert pairs and pairs == named[: len(pairs)]
    opened = html[html.index('<section class="opened"') :]
    assert found(r'class="effect [^"]*" style="[^"]*">([^<]*)<', opened) == effects
    states = [entry for state in ("residual", "ffn", "output") for entry in layer[state][:5]]
    assert found(r'<span class="n">([^<]*)</span>', opened) == [probability(entry["p"]) for entry in states]
    grid = client.get("/api/trace", params={"prompt": PROMPT}).json()
    assert html.count('class="cell') >= sum(len(row) for row in grid["layers"])


def test_a_continuation(client: TestClient, index: Index, run: Run, model_folder: Path) -> None:
    """The page Steer shows what this address answers, nothing of its own."""
    asked: dict[str, str | int] = {"prompt": PROMPT, "count": 4, "set": "L1N7=x4"}
    whole = json.loads(client.get("/api/steer", params=asked).text.splitlines()[-1])
    words = ["trace", index.folder, PROMPT, "--set", "L1N7=x4", "--generate", "4", "--model", model_folder]
    assert command(run, *words)["continuation"][-1]["text"] == whole["text"]
    assert client.get("/steer", params=asked).status_code == 200


def test_saved_memories(own_index: Index, client_of: Callable[..., TestClient], run: Run) -> None:
    client = client_of(own_index.folder)
    client.put("/api/collections/L1N7", json={"star": True, "name": "rivers", "lists": ["water"]})
    kept = client.get("/api/collections").json()
    assert command(run, "collect", own_index.folder) == kept and len(kept) == 1
    html = client.get("/collections").text
    assert found(r'<a class="memory" href="/m/(\w+)"', html) == ["L1N7"] and "rivers" in html and "water" in html


def test_a_comparison(client: TestClient, index: Index, run: Run) -> None:
    shown = command(run, "compare", index.folder, index.folder, "--layers", "0:1", "--top", "5")
    answer = client.get("/api/compare", params={"layers": "0:1", "top": 5}).json()
    assert answer == shown
    names = [f"{one['before']['memory']} → {one['after']['memory']}" for one in answer["changes"]]
    assert len(names) == 5
    assert found(r"<h3>([^<]*)</h3>", client.get("/compare", params={"layers": "0:1", "top": 5}).text) == names
    words = ["compare", index.folder, index.folder, "--layers", "0:1", "--top", "5", "--changed"]
    assert client.get("/api/compare?layers=0:1&top=5&order=changed").json() == command(run, *words) != shown


def test_a_study(own_index: Index, client_of: Callable[..., TestClient]) -> None:
    """The page Annotate, its address and `memlens annotate` say the same of a sample."""
    client = client_of(without_labels(own_index).folder)
    assert client.post("/api/annotate/sample", json={"per_layer": 2}).status_code == 200
    study = client.get("/api/annotate").json()
    html = client.get("/annotate").text
    assert len(study["memories"]) == 6 and f"6 memories, {study['top']} prefixes per memory" in text_of(html)
