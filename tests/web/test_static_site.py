"""`memlens site` writes the pages of the workbench, for a disk and for any host."""

import functools
import gzip
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from fastapi.testclient import TestClient

import memlens
from memlens.circuits.export import save_graph
from memlens.files import FOLDER_MARK
from memlens.index.memory import read_memory
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.web.static_site import localized, make_gallery, shard_of

MANY = 50  # more triggers than any list has


def data(site: Path, name: str) -> Any:
    """The content of a file of data."""
    match = re.fullmatch(r'memlensSite\.arrived\("(.*)","(.*)"\)\n', (site / "data" / f"{name}.js").read_text())
    assert match is not None and match[1] == name
    return json.loads(gzip.decompress(b64decode(match[2])))


def main_of(page: str) -> str:
    return page.partition('<main id="main" tabindex="-1">')[2].rpartition("</main>")[0].strip()


def without_model(page: str) -> str:
    """A page but for what stands there of the model, and what only a server can keep."""
    page = re.sub(r'<section class="silence".*?</section>', "", page, flags=re.DOTALL)
    page = re.sub(r'<a class="context-of".*?</a>', "", page)
    page = re.sub(r"(This needs the model: ).*", r"\1", page)
    page = re.sub(r'<p class="saved">.*?</p>\s*', "", page, flags=re.DOTALL)
    return re.sub(r'<form class="keep".*?</form>\s*', "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def site(index: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return memlens.site(index, out=tmp_path_factory.mktemp("static") / "site", top=MANY).parent


def names_of(index: Index) -> list[str]:
    return [str(index.names.name(layer, n)) for layer in index.layers for n in range(index.memories(layer))]


def test_every_page_of_a_memory_is_that_of_the_workbench(
    site: Path, index: Index, client_of: Callable[..., TestClient]
) -> None:
    client = client_of(index.folder)
    about = data(site, "site")
    for row, name in enumerate(names_of(index)):
        pages = data(site, f"pages/{row // about['pages']}")[row % about["pages"]]
        assert pages
        for end, page in zip(("top", "bottom")[: len(pages)], pages, strict=True):
            answer = client.get(f"/m/{name}", params={} if end == "top" else {"end": end})
            assert without_model(page) == localized(without_model(main_of(answer.text))), name


def test_saved_circuits_are_a_page(index: Index, model: MemoryModel, tmp_path: Path, browser: Any) -> None:
    graph = memlens.circuit(model, "The river runs", nodes=5)
    save_graph(graph, tmp_path / "circuit.json")
    page = memlens.site(index, out=tmp_path / "site", layers=[0], circuits=[tmp_path / "circuit.json"])
    assert data(page.parent, "circuits/0") == graph.to_json()
    text = (page.parent / "circuit.html").read_text()
    assert "The river runs" in text and 'data-site="circuit"' in text and 'href="circuit.html"' in page.read_text()
    context = browser.new_context()
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto((page.parent / "circuit.html").as_uri())
    opened.locator("#graph .node[data-id^=L]").nth(4).click()
    opened.locator("#details .sum").nth(1).wait_for()
    assert opened.get_by_text("Silence").count() == 0 and not problems  # a site has no model
    context.close()


def test_without_saved_circuits_there_is_no_page_of_them(site: Path) -> None:
    assert not (site / "circuit.html").exists() and "circuit.html" not in (site / "index.html").read_text()


def test_saved_names_stars_and_lists_are_in_the_site_but_notes_are_not(
    own_index: Index, client_of: Callable[..., TestClient], tmp_path: Path
) -> None:
    saved = {"star": True, "name": "rivers", "note": "private", "lists": ["water"]}
    assert client_of(own_index).put("/api/collections/L1N7", json=saved).status_code == 200
    site = memlens.site(own_index, out=tmp_path / "site").parent
    row = names_of(own_index).index("L1N7")
    pages, lines = data(site, f"pages/{row // 32}")[row % 32], data(site, f"lines/{row // 256}")[row % 256]
    for text in ((site / "collections.html").read_text(), pages[0], lines):
        assert "rivers" in text and "★" in text and "private" not in text
    assert "water" in pages[0]


def test_names_lead_to_rows(site: Path, index: Index) -> None:
    groups = data(site, "site")["groups"]
    rows = {f"{one['prefix']}{n}": one["first"] + n for one in groups for n in range(one["count"])}
    assert rows == {name: row for row, name in enumerate(names_of(index))}


def test_words_tokens_and_patterns_lead_to_the_memories_that_have_them(site: Path, index: Index) -> None:
    about = data(site, "site")
    found: dict[str, dict[str, Any]] = {
        place: {word: rows for n in range(count) for word, rows in data(site, f"{place}/{n}").items()}
        for place, count in about["shards"].items()
    }
    triggers: dict[str, list[int]] = {}
    values: dict[str, list[int]] = {}
    patterns: dict[str, list[int]] = {}
    for row, name in enumerate(names_of(index)):
        record = read_memory(index, name)
        lists = [record.triggers["top"], record.triggers["bottom"]]
        texts = [(one.text, one.text + one.after) for own in lists for one in own]
        words = {w[0].lower() for text, whole in texts for w in re.finditer(r"\w+", whole) if w.end() <= len(text)}
        for word in words:
            triggers.setdefault(word, []).append(row)
        for word in {word for one in record.patterns or () for word in re.findall(r"\w+", one.description.lower())}:
            patterns.setdefault(word, []).append(row)
        for token in record.value.promotes[:15] if record.value else ():
            values.setdefault(token.text, []).append(row)
    summed = {word: [sum(steps[: n + 1]) for n in range(len(steps))] for word, steps in found["triggers"].items()}
    assert summed == triggers
    assert {word: [sum(own[: n + 1]) for n in range(len(own))] for word, own in found["patterns"].items()} == patterns
    assert {token: [row for row, _, _ in hits] for token, hits in found["values"].items()} == values
    assert all(word in data(site, f"triggers/{shard_of(word, about['shards']['triggers'])}") for word in triggers)


def test_a_site_of_one_layer_names_memories_of_no_other(index: Index, tmp_path: Path, run: Callable[..., Any]) -> None:
    code, _, err = run("site", index.folder, "-o", tmp_path / "site", "--layers", "1", "--top", "2")
    assert code == 0, err
    report = (tmp_path / "site" / "report.html").read_text()
    assert {int(found) for found in re.findall(r"\bL(\d+)[NES]\d", report)} <= {1}


def test_layers_and_top_make_a_site_smaller(
    index: Index, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run(
        "site", index.folder, "-o", tmp_path / "s", "--layers", index.layers[-1], "--top", "2", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "s").rglob("*") if path.is_file()
    )
    assert {one["layer"] for one in data(tmp_path / "s", "site")["groups"]} == {index.layers[-1]}
    shown = [page.count('<li data-rank="') for own in data(tmp_path / "s", "pages/0") for page in own]
    assert max(shown) == 2
    assert f">{index.names.name(index.layers[0], 0)}<" not in (tmp_path / "s" / "search.html").read_text()


def test_invalid_output_folders_and_options_are_refused(
    index: Index, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    assert "did not make" in refused("site", index.folder, "-o", tmp_path / "mine")
    (tmp_path / "mine" / "data").mkdir()
    (tmp_path / "mine" / "data" / "figures.csv").write_text("1,2")
    assert "was not made by memlens" in refused("site", index.folder, "-o", tmp_path / "mine", "--force")
    assert (tmp_path / "mine" / "data" / "figures.csv").read_text() == "1,2"
    assert "lies inside" in refused("site", index.folder, "-o", index.folder / "site")
    assert "layer 99" in refused("site", index.folder, "-o", tmp_path / "s", "--layers", "99")
    assert "--top" in refused("site", index.folder, "-o", tmp_path / "s", "--top", "0")
    assert not (tmp_path / "s").exists()


def test_a_site_can_be_one_file(
    index: Index, site: Path, tmp_path: Path, run: Callable[..., Any], refused: Any
) -> None:
    archive = tmp_path / "new" / "site.zip"  # the folder is created, as for a site that is a folder
    code, printed, _ = run("site", index.folder, "-o", archive, "--top", MANY)
    assert code == 0 and printed == f"{archive}\n"
    first = archive.read_bytes()
    assert run("site", index.folder, "-o", archive, "--top", MANY)[0] == 0 and archive.read_bytes() == first
    with ZipFile(archive) as packed:
        packed.extractall(tmp_path / "unpacked")
    files = [path.relative_to(site) for path in site.rglob("*") if path.is_file() and path.name != FOLDER_MARK]
    assert all((tmp_path / "unpacked" / name).read_bytes() == (site / name).read_bytes() for name in files)
    with ZipFile(tmp_path / "own.zip", "w") as own:
        own.writestr("diary.txt", "dear diary")
    assert "was not made by memlens" in refused("site", index.folder, "-o", tmp_path / "own.zip")
    assert list(tmp_path.rglob("*.part")) == []


def test_the_workbench_redirects_addresses_of_a_site(client: TestClient, index: Index) -> None:
    name = names_of(index)[3]
    for address, expected in {
        f"/memory.html?name={name}": f"/m/{name}",
        f"/memory.html?name={name}&end=bottom": f"/m/{name}?end=bottom",
        "/search.html?q=river+bank": "/search?q=river+bank",
        "/index.html": "/",
    }.items():
        answer = client.get(address, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (308, expected)


@contextmanager
def hosted(folder: Path) -> Iterator[str]:
    """`python -m http.server`."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("way", ["file", pytest.param("http", marks=pytest.mark.sweep)])
def test_a_site_is_browsed_and_searched_without_a_server(
    way: str, site: Path, index: Index, browser: Any, client: TestClient
) -> None:
    with hosted(site) as address:
        base = address if way == "http" else site.as_uri()
        context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
        page = context.new_page()
        problems: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{base}/index.html")
        page.wait_for_selector("[data-drawn=max]")
        page.select_option("#by", "frequency")
        page.wait_for_selector("[data-drawn=frequency]")
        for order in ("level", "class", "likeness"):
            page.select_option("#sort", order)
            page.wait_for_selector(f"[data-sorted={order}]")
            assert page.url.endswith(f"by=frequency&sort={order}")
            page.focus("canvas")
            page.keyboard.press("ArrowRight")
            served = client.get("/api/map", params={"by": "frequency", "sort": order}).json()["memories"]
            assert page.inner_text(".now b") == f"L0N{int.from_bytes(b64decode(served)[:4], 'little')}"
        for name in names_of(index)[::3][:20]:
            page.goto(f"{base}/memory.html?name={name}")
            page.wait_for_selector(f".memory-page[data-name={name}]")
            facts = index[name]
            assert page.locator(".trigger-list > li").count() == len(index.triggers(name)) or facts.dead
        page.click("a[rel=next]")
        page.wait_for_selector(".memory-page")
        page.goto(f"{base}/search.html?q=river")
        page.wait_for_selector(".results li")
        expected = {str(name) for name in map(str, names_of(index)) if has_word(index, name, "river")}
        count = page.inner_text("#results .count")
        assert int(count.split()[0].replace(",", "")) == len(expected)
        assert {one.inner_text() for one in page.locator(".results .memory").all()} <= expected
        page.click(".results a")
        page.wait_for_selector(".memory-page")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.goto(f"{base}/collections.html")
        page.goto(f"{base}/report.html")
        assert not problems and all(one.startswith(base) for one in asked), (problems, asked)
        context.close()


def has_word(index: Index, name: str, word: str) -> bool:
    """Words that begin with it, in any trigger."""
    texts = [one.text for end in ("top", "bottom") for one in index.triggers(name, end)]
    return any(re.search(rf"\b{word}\w*", text.lower()) for text in texts)


def test_a_gallery_has_only_the_selected_memories_with_their_evidence(
    index: Index, tmp_path: Path, browser: Any
) -> None:
    chosen = [name for name in names_of(index) if index.triggers(name)][::-7]  # neither in order nor adjacent
    evidence = {name: (f"evidence of {name}", f"It is proven for {name}.") for name in chosen}
    page = make_gallery(index.folder, tmp_path / "gallery", evidence, ["All about it."])
    rows = sorted(chosen, key=names_of(index).index)
    about = data(page.parent, "site")
    assert [f"{one['prefix']}{number}" for one in about["groups"] for number in one["numbers"]] == rows
    assert [re.search(r'data-name="(\w+)"', one[0])[1] for one in all_pages(page.parent, len(rows))] == rows
    numbers = data(page.parent, "statistics")["numbers"]["max"]
    highest = {
        str(index.names.name(row["layer"], row["memory"])): row["max"] for row in index.table("memories").to_pylist()
    }
    assert b64decode(numbers) == np.array([highest[name] for name in rows], "<f4").tobytes()
    listed = re.findall(r'class="memory">(\w+) ?<', page.read_text())
    assert listed == chosen and "All about it." in page.read_text() and "evidence of " + chosen[0] in page.read_text()
    context = browser.new_context()
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(page.as_uri())
    opened.click(".results li:nth-child(2) a")
    opened.wait_for_selector(f".memory-page[data-name={chosen[1]}]")
    assert opened.get_by_text(f"It is proven for {chosen[1]}.").count() == 1
    opened.goto(f"{page.parent.as_uri()}/memory.html?name={rows[0]}")
    opened.click("a[rel=next]")
    opened.wait_for_selector(f".memory-page[data-name={rows[1]}]")
    opened.goto(
        f"{page.parent.as_uri()}/memory.html?name={next(name for name in names_of(index) if name not in chosen)}"
    )
    opened.get_by_text("does not include").wait_for()
    opened.goto(f"{page.parent.as_uri()}/search.html?in=name&q={rows[-1]}")
    opened.wait_for_selector(".results li")
    assert [one.inner_text() for one in opened.locator(".results .memory").all()] == [rows[-1]] and not problems
    context.close()


def all_pages(site: Path, count: int) -> list[list[str]]:
    """The pages of all memories, in the order of their rows."""
    return [page for number in range(-(-count // 32)) for page in data(site, f"pages/{number}")]
