"""The workbench as static files (`memlens site`), for readers without a server.

    index.html, search.html, memory.html, collections.html, circuit.html,
    report.html pages made from the workbench's templates; circuit.html only if there are saved circuits
    static/     styles and scripts; site.js replaces the server
    data/       pages/ (the page of every memory), lines/ (every memory as a search result), triggers/, values/ and
                patterns/ (memories by word, token or pattern), statistics, maps and charts

A data file is a script that passes gzipped JSON to site.js, because a page opened from disk may run scripts but not
read other files. A row is the position of a memory among all memories of the included layers. The site includes the
names, stars and lists of memories, but not notes and labels.

A gallery (`make_gallery`) contains only selected memories. Its first page lists them, with the evidence for each.
"""

import base64
import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from memlens.circuits.export import load_graph
from memlens.circuits.result import Circuit
from memlens.errors import SettingError
from memlens.files import FOLDER_MARK, explain_os_errors, prepare_output_folder, refuse_output, replacing
from memlens.index.memory import MemoryRecord, TokenNumber, read_memory, read_summaries
from memlens.index.search import MemoryHit, SearchQuery, SearchResult, search
from memlens.memory import MemoryId, Trigger
from memlens.progress import Progress, no_progress
from memlens.reports.report import SITE, make_report
from memlens.reports.sections import Section
from memlens.text import finite
from memlens.web.memory_map import draw_map, list_measures, read_similarity_orders, read_statistics
from memlens.web.pages.collections import collections_content, names_beside
from memlens.web.pages.memory import TOKENS_SHOWN, LabeledMemory, has_bottom, memory_content
from memlens.web.pages.overview import overview_content, read_charts
from memlens.web.pages.search import read_asked, search_content
from memlens.web.rendering import render, static_files, vega_file
from memlens.web.workbench import ServedIndex, Workbench

# index.html is removed first and written last, so a site without it is incomplete
PAGES = ("index.html", "search.html", "memory.html", "collections.html", "circuit.html", "report.html", "404.html")
_PAGES_PER_FILE = 32
_LINES_PER_FILE = 256
_MEMORIES_PER_READ = 512
_MAX_SHARDS = {"triggers": 512, "values": 256, "patterns": 128}
_MEMORIES_PER_SHARD = 16
_NAV = (("/", "Overview"), ("/search", "Search"), ("/collections", "Collections"), ("/report", "Report"))
# values of template variables that only the workbench has
_ABSENT: dict[str, Any] = {"related": None, "expert": None, "contexts": {}}
_WORD = re.compile(r"\w+")
_MAIN = '<main id="main" tabindex="-1">'
_MODULES = ("overview.js", "search.js", "memory.js", "circuit.js")
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE)
_ADDRESS = re.compile(r'\b(href|src|action)="/([^"]*)"')


class SiteIndex(ServedIndex):
    """An index restricted to some layers.

    A query for one memory also reads the rows of all other memories of its batch.
    """

    def __init__(self, folder: str | Path, layers: Sequence[int] | None) -> None:
        super().__init__(folder)
        self.named: MemoryId | None = None  # the memory that the search field gives as an example
        for layer in layers or ():
            self.memories(layer)  # raise UnknownName for a layer that was not scanned
        self._shown = None if layers is None else tuple(layers)
        self._batch: list[MemoryId] = []
        self._rows: dict[tuple[str, ...], dict[MemoryId, list[dict[str, Any]]]] = {}
        self._texts: dict[int, dict[str, Any]] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        shown = getattr(self, "_shown", None)
        return self.manifest.layers if shown is None else shown

    @property
    def example(self) -> MemoryId:
        return self.named or super().example

    def table(self, table: str, columns: Sequence[str] | None = None, filters: Any = None) -> pa.Table:
        rows = super().table(table, columns, filters)
        if self._shown is None or "layer" not in rows.column_names:
            return rows
        return rows.filter(pc.is_in(rows.column("layer"), pa.array(self._shown, rows.schema.field("layer").type)))

    def _source_of(self, table: str) -> str:
        source = super()._source_of(table)
        if self._shown is None or "layer" not in pq.read_schema(self.path(table)).names:
            return source
        return f"(SELECT * FROM {source} WHERE layer IN ({', '.join(map(str, self._shown))}))"

    def start_batch(self, part: list[MemoryId]) -> None:
        """Set the batch: the memories whose pages are written next."""
        self._batch, self._rows, self._texts = part, {}, {}

    def rows_of(
        self, table: str, memories: Iterable[MemoryId], columns: str = "*", *, where: str = "true", order: str = ""
    ) -> dict[MemoryId, list[dict[str, Any]]]:
        asked, key = list(memories), (table, columns, where, order)
        if len(asked) != 1 or asked[0] not in self._batch:
            return super().rows_of(table, asked, columns, where=where, order=order)
        if key not in self._rows:
            self._rows[key] = super().rows_of(table, self._batch, columns, where=where, order=order)
            if table in ("triggers", "ordinary"):
                wanted = {row["sentence"] for rows in self._rows[key].values() for row in rows}
                self._texts |= super().sentences(sorted(wanted - self._texts.keys()))
        return {asked[0]: self._rows[key][asked[0]]}

    def sentences(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        if all(number in self._texts for number in ids):
            return {number: self._texts[number] for number in ids}
        return super().sentences(ids)


class SiteBench(Workbench):
    """The workbench as seen by the templates of a site, without a model."""

    folder = "INDEX"  # a placeholder, because readers of the site have no index

    def __init__(self, index: SiteIndex) -> None:
        super().__init__(index)
        self.index = index

    @property
    def status_text(self) -> str:
        return "a static site does not have it; start the workbench with `memlens serve INDEX`"


def make_site(
    folder: str | Path,
    out: Path,
    *,
    layers: Sequence[int] | None = None,
    top: int = 10,
    circuits: Sequence[str | Path] = (),
    force: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Write an index as a static site. Returns the path of its first page, or of the archive.

    Args:
        out: Folder to write to, or a .zip file.
        layers: Layers to include. Default: all.
        top: Number of top triggers, and of bottom triggers, per memory.
        circuits: Saved circuits to include.
        force: Replace an existing site.
    """
    if top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    graphs = [load_graph(path) for path in circuits]
    index = SiteIndex(folder, layers)
    if out.suffix.lower() != ".zip":
        prepare_output_folder(out, force=force, replaced=(*PAGES, "data", "static"))
        with explain_os_errors(out):
            _Site(index, out, top, graphs, progress).write()
        return out / "index.html"
    refuse_output(out, _is_archive, force=force)
    with explain_os_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)  # before the pages are made, which takes long
    with explain_os_errors(out), TemporaryDirectory(prefix="memlens-site-") as temporary, replacing(out) as beside:
        _Site(index, Path(temporary), top, graphs, progress).write()
        _pack(Path(temporary), beside)
    return out


def _pack(folder: Path, archive: Path) -> None:
    """Write the files of a site to an archive whose first file names memlens. Equal sites give equal bytes."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with ZipFile(archive, "w", ZIP_DEFLATED) as packed:
        packed.writestr(ZipInfo(FOLDER_MARK), "memlens made this archive.\n")
        for name in names:
            packed.writestr(ZipInfo(name), (folder / name).read_bytes(), ZIP_DEFLATED)


def _is_archive(head: bytes) -> bool:
    """Return True for the first bytes of an archive that memlens wrote."""
    return head.startswith(b"PK") and head[30:].startswith(FOLDER_MARK.encode())  # 30: the name of the first file


class _Site:
    static: tuple[str, ...] = ("circuit", "collections", "icon", "memory", "overview", "search", "site", "style")

    def __init__(self, index: SiteIndex, out: Path, top: int, circuits: list[Circuit], progress: Progress) -> None:
        self.index, self.out, self.top, self.circuits, self.progress = index, out, top, circuits, progress
        self.nav: tuple[tuple[str, str], ...] = (*_NAV[:2], ("/circuit", "Circuit"), *_NAV[2:]) if circuits else _NAV
        self.bench = SiteBench(index)
        self.ends = ("top", "bottom") if has_bottom(index) else ("top",)
        self.triggers: dict[str, list[int]] = defaultdict(list)
        self.patterns: dict[str, list[int]] = defaultdict(list)
        self.values: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        self.words: dict[int, tuple[list[str], list[int]]] = {}  # sentence -> words, where they end
        # notes may be private, so they are left out
        saved = {memory: replace(note, note="") for memory, note in names_beside(index).items()}
        self.saved = {memory: note for memory, note in saved.items() if memory.layer in index.layers}

    @cached_property
    def names(self) -> list[MemoryId]:
        """All memories of the site, in the order of their rows."""
        name, count = self.index.names.name, self.index.memories
        return [name(layer, number) for layer in self.index.layers for number in range(count(layer))]

    def write(self) -> None:
        self.progress("site", 0, len(self.names))
        self.write_static()
        self.write_pages()
        self.write_words()
        self.write_whole()
        make_report(self.index, self.out / "report.html", force=True, links=SITE)
        self.write_frames()

    # Data

    def data(self, name: str, content: Any) -> None:
        text = json.dumps(finite(content), ensure_ascii=False, separators=(",", ":"))
        packed = base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode()
        path = self.out / "data" / f"{name}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_text(f'memlensSite.arrived("{name}","{packed}")\n', encoding="ascii")

    def write_pages(self) -> None:
        """Write the page and the search result of every memory, and collect the words by which it can be found."""
        pages: list[list[str]] = []
        for first in range(0, len(self.names), _MEMORIES_PER_READ):
            part = self.names[first : first + _MEMORIES_PER_READ]
            self.index.start_batch(part)
            for row, name in enumerate(part, first):
                view = self.view_of(name)
                pages.append([self.main_of(view, end) for end in self.ends])
                self.note_words(row, view)
                if len(pages) == _PAGES_PER_FILE or row + 1 == len(self.names):
                    self.data(f"pages/{row // _PAGES_PER_FILE}", pages)
                    pages = []
                self.progress("site", row + 1, len(self.names))
            self.words.clear()
            self.index.start_batch([])
        for first in range(0, len(self.names), _LINES_PER_FILE):
            self.data(f"lines/{first // _LINES_PER_FILE}", self.lines_of(self.names[first : first + _LINES_PER_FILE]))

    def view_of(self, name: MemoryId) -> LabeledMemory:
        record = read_memory(self.index, name, self.ends, self.top)
        return LabeledMemory(**vars(record), labels=(), unfinished=None)

    def main_of(self, view: LabeledMemory, end: str) -> str:
        saved = self.saved.get(view.name)
        page = self.render("memory.html", "/m", kept=saved, **_ABSENT, **self.content_of(view, end))
        return page.partition(_MAIN)[2].rpartition("</main>")[0].strip()

    def content_of(self, view: LabeledMemory, end: str) -> dict[str, Any]:
        return memory_content(self.index, view, end)

    def lines_of(self, names: list[MemoryId]) -> list[str]:
        """Return the memories in the form of search results."""
        summaries = read_summaries(self.index, names)
        hits = tuple(MemoryHit(name, summaries.get(name)) for name in names)
        answer = SearchResult((), "name", len(hits), hits)
        content = search_content(self.index, read_asked()) | {"problem": None, "more": "", "kept": self.saved}
        page = self.render("results.html", "/search", answer=answer, **content)
        return ["<li" + line.partition("</li>")[0] + "</li>" for line in page.split("<li")[1:]]

    def note_words(self, row: int, record: MemoryRecord) -> None:
        words_here: set[str] = set()
        for end in self.ends:
            for trigger in record.triggers[end]:
                sentence = trigger.prefix.sentence
                if sentence not in self.words:
                    text = trigger.text + trigger.after
                    matches = [(match[0].lower(), match.end()) for match in _WORD.finditer(text)]
                    self.words[sentence] = [match[0] for match in matches], [match[1] for match in matches]
                words, ends = self.words[sentence]
                words_here.update(words[: bisect_right(ends, len(trigger.text))])
        for word in sorted(words_here):  # the order of a set differs between processes
            self.triggers[word].append(row)
        named = {word for pattern in record.patterns or () for word in _WORD.findall(pattern.description.lower())}
        for word in sorted(named):
            self.patterns[word].append(row)
        for place, token in enumerate(record.value.promotes[:TOKENS_SHOWN] if record.value else ()):
            self.values[token.text].append((row, place, float(f"{token.number:.4g}")))

    @cached_property
    def shards(self) -> dict[str, int]:
        return {place: min(most, len(self.names) // _MEMORIES_PER_SHARD + 1) for place, most in _MAX_SHARDS.items()}

    def write_words(self) -> None:
        for place, lists in (("triggers", self.triggers), ("patterns", self.patterns)):
            shards: list[dict[str, list[int]]] = [{} for _ in range(self.shards[place])]
            for word, rows in lists.items():
                steps = [row - before for row, before in zip(rows, [0, *rows], strict=False)]
                shards[shard_of(word, len(shards))][word] = steps
            for number, content in enumerate(shards):
                self.data(f"{place}/{number}", content)
        tokens: list[dict[str, Any]] = [{} for _ in range(self.shards["values"])]
        for text, hits in self.values.items():
            tokens[shard_of(text.strip().lower(), len(tokens))][text] = hits
        for number, content in enumerate(tokens):
            self.data(f"values/{number}", content)

    def write_whole(self) -> None:
        """Write the files about all memories: names, statistics, maps and charts."""
        statistics = read_statistics(self.index)
        self.write_statistics()
        most = max(self.index.memories(layer) for layer in self.index.layers)
        for measure in list_measures(statistics):
            self.data(f"map-{measure.name}", draw_map(statistics, measure.name, most).model_dump())
        orders = read_similarity_orders(self.index)
        in_order = np.concatenate([orders[layer].astype("<u4") for layer in self.index.layers])
        self.data("likeness", _encode(in_order))
        self.data("charts", TypeAdapter(list[Section]).dump_python(read_charts(self.index), mode="json"))
        with replacing(self.out / "static" / "vega.js") as beside:
            beside.write_bytes(vega_file()[0])

    def write_statistics(self) -> None:
        """Write the names and the statistics of the memories of the site."""
        self.data(
            "site",
            {
                "model": self.index.manifest.model.name,
                "groups": list(self.groups()),
                "pages": _PAGES_PER_FILE,
                "lines": _LINES_PER_FILE,
                "shards": {
                    place: count if place == "triggers" or self.index.has(place) else 0
                    for place, count in self.shards.items()
                },
            },
        )
        statistics = read_statistics(self.index)
        rows = [statistics.row_of(name) for name in self.names]
        packed = {name: _encode(column[rows].astype("<f4")) for name, column in statistics.numbers.items()}
        kinds = {name: _encode(column[rows]) for name, column in statistics.categories.items()}
        self.data("statistics", {"numbers": packed, "categories": kinds})

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield groups of memories whose names differ only in the last number, with the row of the first memory."""
        first = 0
        for owner, names in groupby(self.names, key=lambda name: name.owner):
            count = sum(1 for _ in names)
            yield {"prefix": owner.beginning, "layer": owner.layer, "first": first, "count": count}
            first += count

    # Pages

    def render(self, template: str, path: str, **content: Any) -> str:
        return localized(render(template, self.bench, path, self.nav, is_site=True, **content))

    def write_static(self) -> None:
        (self.out / "static").mkdir()
        contents = {name: content for name, (content, _, _) in static_files().items()}
        base = contents.pop("base.js").decode()
        for name in _MODULES:
            contents[name] = classic_script(base, contents[name].decode()).encode()
        for name, content in contents.items():
            if name.startswith(self.static):
                with replacing(self.out / "static" / name) as beside:
                    beside.write_bytes(content)

    def write_frames(self) -> None:
        """Write the pages. site.js adds the content to the page of a memory."""
        self.write_search(search(self.index, SearchQuery(layers=self.index.layers)))
        saved = collections_content(self.index, self.saved)
        self.write_page(
            "collections.html", "collections", self.render("collections.html", "/collections", problems=(), **saved)
        )
        self.write_circuits()
        self.write_memory_frame()
        overview = self.render("overview.html", "/", sections=None, routing=[], **overview_content(self.bench))
        self.write_page("index.html", "overview", overview)

    def write_search(self, answer: SearchResult) -> None:
        """Write the search page, which shows this answer at first."""
        content = search_content(self.index, read_asked())
        content |= {"problem": None, "more": "/search?limit=100", "kept": self.saved}
        self.write_page("search.html", "search", self.render("search.html", "/search", answer=answer, **content))

    def write_memory_frame(self) -> None:
        """Write the page to which site.js adds the content of a memory, and the page for unknown addresses."""
        view = self.view_of(self.names[0])
        page = self.render("memory.html", "/m", kept=None, **_ABSENT, **self.content_of(view, "top"))
        head, _, rest = page.partition(_MAIN)
        head = re.sub(r'<link rel="(prev|next)"[^>]*>\n', "", head)
        head = re.sub(r"<title>.*?</title>", f"<title>{escape(self.index.manifest.model.name)} · memlens</title>", head)
        note = '<noscript><p class="note">This page needs JavaScript.</p></noscript>'
        self.write_page("memory.html", "memory", f"{head}{_MAIN}{note}</main>{rest.rpartition('</main>')[2]}")
        self.write_page("404.html", "", _LOST)

    def write_circuits(self) -> None:
        """Write the page of saved circuits, if there are any, and a data file for each."""
        if not self.circuits:
            return
        for number, graph in enumerate(self.circuits):
            self.data(f"circuits/{number}", graph.to_json())
        titles = [f"{graph.prompt} → {graph.token}" for graph in self.circuits]
        page = self.render("circuit.html", "/circuit", files=titles, prompt="")
        self.write_page("circuit.html", "circuit", page)

    def write_page(self, name: str, kind: str, page: str) -> None:
        """Write a page of the workbench that uses site.js instead of its own scripts."""
        page = re.sub(r'<script type="module" src="[^"]*"></script>\n', "", page)
        page = page.replace("</head>", '<script src="static/site.js"></script>\n</head>', 1) if kind else page
        page = page.replace("<html ", f'<html data-site="{kind}" ', 1)
        with replacing(self.out / name) as beside:
            beside.write_text(page, encoding="utf-8", errors="replace")


# Galleries


@dataclass(frozen=True)
class GalleryHit(MemoryHit):
    """A selected memory, as listed on the first page: its strongest trigger, promoted tokens and summary."""

    trigger: Trigger
    tokens: tuple[TokenNumber, ...]


def make_gallery(
    folder: str | Path,
    out: Path,
    evidence: Mapping[str, tuple[str, str]],
    about: Sequence[str],
    *,
    top: int = 10,
    force: bool = False,
) -> Path:
    """Write the pages of selected memories as a static site. Returns the path of its first page, which lists them.

    Args:
        folder: The index, with values.
        out: Folder to write to.
        evidence: {name of a memory: (evidence in a few words for the list, evidence in sentences for its page)}. The
            list has the same order.
        about: Paragraphs above the list.
        top: Number of top triggers, and of bottom triggers, per memory.
        force: Replace an existing site.
    """
    index = SiteIndex(folder, None)
    site = _Gallery(index, out, top, {index.check(name): texts for name, texts in evidence.items()}, about)
    prepare_output_folder(out, force=force, replaced=(*PAGES, "data", "static"))
    with explain_os_errors(out):
        site.write()
    return out / "index.html"


class _Gallery(_Site):
    static = ("icon", "memory", "search", "site", "style")

    def __init__(
        self, index: SiteIndex, out: Path, top: int, evidence: dict[MemoryId, tuple[str, str]], about: Sequence[str]
    ) -> None:
        super().__init__(index, out, top, [], no_progress)
        self.nav = (("/", "Gallery"), ("/search", "Search"))
        self.evidence, self.about = evidence, about
        index.named = next(iter(evidence))

    @cached_property
    def names(self) -> list[MemoryId]:
        number = self.index.names.number
        return sorted(self.evidence, key=lambda name: (self.index.layers.index(name.layer), number(name)))

    def write(self) -> None:
        self.write_static()
        self.write_pages()
        self.write_words()
        self.write_statistics()
        self.write_search(self.listed(self.names))
        self.write_memory_frame()
        content = search_content(self.index, read_asked()) | {"problem": None, "more": "", "kept": self.saved}
        content |= {"reason": lambda hit: self.evidence[hit.name][0], "about": self.about}
        page = self.render("gallery.html", "/", answer=self.listed(list(self.evidence)), **content)
        self.write_page("index.html", "gallery", page)

    def listed(self, names: list[MemoryId]) -> SearchResult:
        """Return memories as a search result."""
        summaries, hits = read_summaries(self.index, names), []
        for name in names:
            view = self.view_of(name)
            tokens = view.value.promotes[:TOKENS_SHOWN] if view.value else ()
            hits.append(GalleryHit(name, summaries.get(name), view.triggers["top"][0], tokens))
        return SearchResult((), "name", len(hits), tuple(hits))

    def content_of(self, view: LabeledMemory, end: str) -> dict[str, Any]:
        place = self.names.index(view.name)
        around = [self.names[other] if 0 <= other < len(self.names) else None for other in (place - 1, place + 1)]
        content = {"neighbors": tuple(around), "evidence": self.evidence[view.name][1]}
        return super().content_of(view, end) | content

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield groups of memories whose names differ only in the last number, with these numbers."""
        first = 0
        for owner, group in groupby(self.names, key=lambda name: name.owner):
            names = list(group)
            span = {"first": first, "count": len(names), "numbers": [name.memory for name in names]}
            yield {"prefix": owner.beginning, "layer": owner.layer, **span}
            first += len(names)


# Web hosts show this page for unknown addresses. It redirects addresses of the workbench to those of the site.
_LOST = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Not found</title></head>
<body><p>There is no page at this address.</p>
<script>
const found = /^(.*\\/)(m\\/([^/]+)|search|collections|circuit|report)\\/?$/.exec(location.pathname);
if (found && found[3]) location.replace(`${found[1]}memory.html?name=${found[3]}${location.search.replace("?", "&")}`);
else if (found) location.replace(`${found[1]}${found[2]}.html${location.search}`);
</script></body></html>
"""


def localized(page: str) -> str:
    """Replace addresses of the workbench with files of the site.

    Texts stay unchanged, because an address in a text has escaped quotes and does not match.
    """
    return _ADDRESS.sub(lambda match: f'{match[1]}="{_local(match[2])}"', page)


def _local(address: str) -> str:
    path, mark, query = address.partition("?")
    if path.startswith("static/"):
        return address
    if path.startswith("m/"):
        return f"memory.html?name={quote(path[2:])}" + (f"&amp;{query}" if mark else "")
    return f"{path or 'index'}.html{mark}{query}"


def classic_script(base: str, page: str) -> str:
    """Return two modules as one plain script, because a page opened from disk may not load modules."""
    inner = _IMPORT.sub("", page)
    return "(() => {\n" + base.replace("export ", "") + "\n{\n" + inner + "}\n})();\n"


def shard_of(word: str, count: int) -> int:
    """Return the number of a word's file: the FNV-1a hash of the first two letters, modulo `count`, as in site.js."""
    number = 2166136261
    for byte in word[:2].encode("utf-8", "replace"):
        number = ((number ^ byte) * 16777619) & 0xFFFFFFFF
    return number % count


def _encode(column: Any) -> str:
    return base64.b64encode(column.tobytes()).decode()
