"""The verbs do what they say: what they print agrees with the library and with brute force."""

import csv
import io
import json
import signal
from pathlib import Path

import pytest
from cli_helpers import Paths, Run, checksums, triggers_by_end
from safetensors.torch import load_file, save_file

from memlens import api
from memlens.cli.screen import ProgressBar
from memlens.index.reader import Index
from memlens.index.staging import recorded_threads
from memlens.memory import MemoryId
from memlens.models.info import describe
from memlens.models.load import load
from memlens.testing import save_tiny, tiny_model, tiny_tokenizer
from memlens.text import cell_text


def every_memory(index: Index) -> list[MemoryId]:
    return [MemoryId(layer, memory) for layer in index.layers for memory in range(index.memories(layer))]


def test_info_tells_what_the_library_knows_to_machines_and_to_people(run: Run, models: Paths) -> None:
    answer = json.loads(run("info", models["gated"], "--threads", 1, "--json").out)
    known, scan = describe(load(models["gated"])), answer["scan"]
    expected = {"layers": 3, "total_memories": 120, "gated": True, "bos": "<s>", "adds_bos": True}
    assert {name: answer[name] for name in expected} == expected and answer["parameters"] == known.parameters
    assert 0 <= answer["proof"]["output"] <= answer["proof"]["tolerance"]
    assert scan["tokens_per_second"] > 0 and scan["threads"] == 1
    parts = [scan[name] for name in ("weights_bytes", "lists_bytes", "batch_bytes")]
    assert min(parts) > 0 and scan["memory_bytes"] == sum(parts) and parts[0] == 4 * known.parameters
    ran = run("info", models["plain"], "--no-estimate")
    assert ran.code == 0 and ran.err == "" and "scan speed" not in ran.out
    facts = ["120: 3 layers of 40", "not gated", "sequential", "97 tokens", "32 tokens", "<s>, not added", "o = r + y"]
    assert all(words in ran.out for words in facts)


def test_scan_makes_the_index_that_the_library_makes(run, models, made, text, tmp_path) -> None:
    assert run("scan", models["gated"], text, "-o", tmp_path / "index", "--top", 7, "--threads", 1).code == 0
    assert checksums(tmp_path / "index") == checksums(made["gated"])


def test_every_scan_option_reaches_the_scan(run: Run, models: Paths, text: Path, tmp_path: Path) -> None:
    given = {
        **{"top": 3, "per_sentence": "all", "dedup": "sentence", "bottom": "yes", "bos": "yes", "seed": 5},
        **{"max_tokens": 40, "max_length": 9, "batch_tokens": 64, "threads": 1, "preset": "paper"},
    }
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    more = ["--layers", "0,2", "--unit", "line", "--device", "cpu", "--dtype", "float64", "--quiet"]
    ran = run("scan", models["plain"], text, "-o", tmp_path / "index", *options, *more)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    manifest = Index(tmp_path / "index").manifest
    settings = manifest.settings.to_json()
    assert {name: settings[name] for name in given} == given
    assert settings["layers"] == [0, 2] == list(manifest.layers) and manifest.model.dtype == "float64"
    assert manifest.counts.sentences < 5  # lines, of which the first few make 40 tokens


def test_a_preset_gives_way_to_what_is_given_and_the_recorded_number_of_threads_is_used(run, models, text, tmp_path):
    command = ["scan", models["plain"], text, "-o", tmp_path / "index", "--preset", "paper", "--dedup", "prefix"]
    assert recorded_threads(tmp_path / "index") is None
    run(*command, "--threads", 3)
    settings = Index(tmp_path / "index").manifest.settings
    assert (settings.per_sentence, settings.dedup) == ("all", "prefix")
    assert recorded_threads(tmp_path / "index") == 3
    ran = run(*command)
    assert ran.code == 0 and "already complete" in ran.err


def test_the_summary_counts_what_was_cut_repeated_and_dead(run, models, text, tmp_path) -> None:
    common = ("scan", models["plain"], text, "-o", tmp_path / "index", "--threads", 1, "--max-length", 9)
    people, machines = run(*common), run(*common, "--json")
    summary = json.loads(machines.out)
    corpus = Index(tmp_path / "index").table("corpus").to_pylist()
    assert summary["cut_sentences"] == sum(row["cut"] > 0 for row in corpus) > 0
    assert summary["cut_tokens"] == sum(row["cut"] for row in corpus)
    prefixes = [tuple(row["tokens"][: end + 1]) for row in corpus for end in range(len(row["tokens"]))]
    assert summary["repeated_prefixes"] == len(prefixes) - len(set(prefixes)) > 0
    assert set(summary["dead"]) == {"0", "1", "2"}
    assert all(
        str(summary[name]) in people.out for name in ("cut_sentences", "cut_tokens", "repeated_prefixes", "tokens")
    )
    assert "next: memlens show" in people.err and "already complete" in machines.err


def test_dead_memories_are_counted_by_layer(run: Run, tmp_path: Path, text: Path) -> None:

    folder = save_tiny(tmp_path / "model", "opt")  # ReLU: a key bias far below zero silences a memory
    weights = load_file(folder / "model.safetensors")
    weights["model.decoder.layers.1.fc1.bias"][[4, 9]] = -1e4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    summary = json.loads(run("scan", folder, text, "-o", tmp_path / "index", "--threads", 1, "--json").out)
    assert summary["dead"]["1"] >= 2
    shown = run("show", tmp_path / "index", "L1N4")
    assert "dead" in shown.out and "no top triggers" in shown.out
    lines = [json.loads(line) for line in run("export", tmp_path / "index").out.splitlines()]
    assert [line["triggers"] for line in lines if line["name"] == "L1N9"] == [{"top": [], "bottom": []}]


def test_an_interrupted_scan_exits_with_130_and_continues_to_the_same_bytes(run, models, text, tmp_path, monkeypatch):
    options = ["--top", 7, "--threads", 1, "--batch-tokens", 64]
    command = ["scan", models["plain"], text, "-o", tmp_path / "index", *options]
    report = ProgressBar.__call__

    def press_control_c(self: ProgressBar, stage: str, done: int, total: int | None) -> None:
        report(self, stage, done, total)
        if stage == "scan" and done:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "__call__", press_control_c)
        stopped = run(*command)
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == "memlens: interrupted; run the same command again to resume\n"
    assert not (tmp_path / "index" / "manifest.json").exists()

    continued = run(*command)
    assert continued.code == 0 and "resuming the interrupted scan" in continued.err
    api.scan(models["plain"], text, out=tmp_path / "whole", top=7, threads=1, batch_tokens=64)
    assert checksums(tmp_path / "index") == checksums(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_show_as_json_is_complete(run: Run, made: Paths, kind: str) -> None:
    index = Index(made[kind])
    answer = json.loads(run("show", made[kind], "L1N3", "--json").out)
    facts = index["L1N3"]
    assert (answer["name"], answer["max"], answer["frequency"]) == ("L1N3", facts.max, facts.frequency)
    assert answer["histogram"] == list(facts.histogram) and len(answer["histogram_edges"]) + 1 == len(facts.histogram)
    for end in ("top", "bottom"):
        triggers = index.triggers("L1N3", end)
        assert [t["before"] + t["token"] for t in answer["triggers"][end]] == [t.text for t in triggers]
        assert [t["next_token"] for t in answer["triggers"][end]] == [t.next_token for t in triggers]
    assert bool(answer["triggers"]["bottom"]) == (kind == "gated")


def test_show_lists_both_ends_best_first_with_the_token_marked(run: Run, made: Paths) -> None:
    index = Index(made["gated"])
    memory = next(str(m) for m in every_memory(index) if index.triggers(m) and index.triggers(m, "bottom"))
    both, lower = run("show", made["gated"], memory, "--top", 2).out, run("show", made["gated"], memory, "--bottom").out
    for end in ("top", "bottom"):
        for trigger in index.triggers(memory, end)[:2]:
            assert f"{trigger.before}«{trigger.token}»" in both
    assert both.index("top triggers (2 of") < both.index("bottom triggers (2 of")
    assert "top triggers" not in lower and "bottom triggers" in lower


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize(
    ("query", "options"),
    [
        *((q, []) for q in ("river", "é", "The")),
        *((q, ["--ends"]) for q in ("the", " the")),
        *((q, ["-i"]) for q in ("RIVER", "ÉD OP")),
    ],
)
def test_search_finds_what_looking_at_every_trigger_finds(run, made, kind, query, options) -> None:
    ignores = "-i" in options or query == query.lower()
    wanted = query.lower() if ignores else query
    naive = []
    for (name, end), triggers in triggers_by_end(made[kind]).items():
        texts = [text.lower() if ignores else text for text, _ in triggers]
        hits = [r for r, t in enumerate(texts) if (t.endswith(wanted) if "--ends" in options else wanted in t)]
        if hits:
            memory = MemoryId.parse(name)
            naive.append((-len(hits), hits[0], memory.layer, memory.memory, end))
    naive.sort(key=lambda match: (*match[:4], match[4] == "bottom"))
    answer = json.loads(run("search", made[kind], query, *options, "--limit", 10_000, "--json").out)
    hits = [(MemoryId.parse(hit["name"]), hit) for hit in answer["found"]]
    found = [(-m["matches"], m["trigger"]["rank"], n.layer, n.memory, m["end"]) for n, m in hits]
    assert found == naive and answer["total"] == len(naive)
    assert query in ("ÉD OP", "é") or naive  # the plain queries do find something


def test_search_takes_the_text_as_it_is_and_says_when_there_is_more(run: Run, made: Paths) -> None:
    for query in ("%", "_", "r.ver", "'", '" OR 1=1 --', "{corpus}", "$1", "\\"):
        ran = run("search", made["plain"], query)
        assert (ran.code, ran.out) == (0, "") and "no memory has" in ran.err
    ran = run("search", made["plain"], "r", "--limit", 2)
    assert len(ran.out.splitlines()) == 3 and "2 of " in ran.err and "--limit" in ran.err


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_export_as_json_lines_has_every_memory_and_trigger(run: Run, made: Paths, kind: str) -> None:
    index = Index(made[kind])
    lines = [json.loads(line) for line in run("export", made[kind], "--format", "jsonl").out.splitlines()]
    assert [line["name"] for line in lines] == [str(memory) for memory in every_memory(index)]
    naive = triggers_by_end(made[kind])
    for line in lines:
        for end, told in line["triggers"].items():
            assert [(t["before"] + t["token"], t["token"]) for t in told] == naive.get((line["name"], end), [])
    one, triggers = index["L2N7"], index.triggers("L2N7")
    told = next(line for line in lines if line["name"] == "L2N7")
    assert (told["max"], told["dead"], told["histogram"]) == (one.max, one.dead, list(one.histogram))
    assert [t["coefficient"] for t in told["triggers"]["top"]] == [t.coefficient for t in triggers]
    following = [None if t.next_token is None else index.vocabulary[t.next_token] for t in triggers]
    assert [t["next_text"] for t in told["triggers"]["top"]] == following


def test_export_as_csv_has_a_row_for_every_trigger_and_survives_any_text(run, models, tmp_path) -> None:
    nasty = 'He said "no", then\t=1+1; "so,\rbe it" a; the \x1b[31mriver'
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": nasty}) + "\n" + json.dumps({"text": "two\nlines the end"}))
    run("scan", models["gated"], tmp_path / "a.jsonl", "-o", tmp_path / "index", "--unit", "document", "--threads", 1)
    ran = run("export", tmp_path / "index", "--format", "csv", "-o", tmp_path / "a.csv")
    content = (tmp_path / "a.csv").read_bytes().decode("utf-8")
    rows = list(csv.DictReader(io.StringIO(content, newline="")))
    naive = [
        (name, end, str(rank), text, token)
        for (name, end), triggers in triggers_by_end(tmp_path / "index").items()
        for rank, (text, token) in enumerate(triggers)
    ]
    read = [(r["name"], r["end"], r["rank"], cell_text(r["text"]), cell_text(r["token"])) for r in rows]
    assert read == naive
    cells = [cell for row in csv.reader(io.StringIO(content, newline="")) for cell in row]
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "@", "\t", "\r")]  # what begins with - is a number
    assert all(float(cell) < 0 for cell in cells if cell.startswith("-"))
    assert f"{len(naive):,} triggers" in ran.err


def test_an_export_can_be_limited_to_the_best_triggers(run: Run, made: Paths) -> None:
    whole = [json.loads(line) for line in run("export", made["gated"]).out.splitlines()]
    for line in whole:
        line["triggers"] = {end: triggers[:2] for end, triggers in line["triggers"].items()}
    ran = run("export", made["gated"], "--top", 2)
    assert [json.loads(line) for line in ran.out.splitlines()] == whole
    rows = list(csv.DictReader(io.StringIO(run("export", made["gated"], "--format", "csv", "--top", 2).out)))
    expected = [
        (line["name"], end, str(one["rank"]))
        for line in whole
        for end in line["triggers"]
        for one in line["triggers"][end]
    ]
    assert [(row["name"], row["end"], row["rank"]) for row in rows] == expected


def test_an_export_that_fails_leaves_the_old_file(run: Run, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("old")
    (plain / "corpus.parquet").unlink()
    assert run("export", plain, "-o", tmp_path / "a.jsonl").code == 2
    assert (tmp_path / "a.jsonl").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("a.")] == ["a.jsonl"]


def test_a_histogram_ends_where_the_memory_does(run: Run, tmp_path: Path, text: Path) -> None:

    model = load(tiny_model("gpt2", activation_function="relu"), tokenizer=tiny_tokenizer())
    made = api.scan(model, text, out=tmp_path / "relu", threads=1)
    for memory in ("L0N1", "L1N5", "L2N9"):
        facts = made[memory]
        low, *_, high = run("show", tmp_path / "relu", memory).out.splitlines()[1].split()
        assert facts.min == 0 and low == "0" and float(high) <= 1.01 * facts.max
