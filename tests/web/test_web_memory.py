"""The page of a memory: content of the index, results of the model, and hostile text."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient

import memlens
from memlens.annotations.records import Annotations, Label, LabeledPattern
from memlens.index.export import export_jsonl
from memlens.index.memory import read_context, read_memory
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.pattern.related import related_memories
from memlens.text import plain
from memlens.tracer.intervene import intervene
from memlens.vocab.nearest import SIDES, nearest_memories
from memlens.web.pages.memory import draw_histogram, score_axis
from waiting import wait_until

ClientOf = Callable[..., TestClient]


def test_json_is_the_record_of_the_library_with_labels_and_show_prints_it(
    client: TestClient, index: Index, run: Callable[..., tuple[int, str, str]]
) -> None:
    for name in ("L0N0", "L1N7", "L2N39"):
        found = client.get(f"/api/memories/{name}").json()
        assert found == plain(read_memory(index, name)) | {"labels": [], "unfinished": None}
    shown = json.loads(run("show", index.folder, "L1N7", "--json")[1])
    assert shown.pop("related") == client.get("/api/memories/L1N7/related?limit=20").json()
    assert shown | {"labels": [], "unfinished": None} == client.get("/api/memories/L1N7").json()


def test_an_exported_line_has_the_statistics_and_triggers_of_the_record(index: Index) -> None:
    sink = io.BytesIO()
    export_jsonl(index, sink)
    for line in map(json.loads, sink.getvalue().splitlines()[::13]):
        record = plain(read_memory(index, line["name"]))
        assert line == {field: record[field] for field in line} and {"max", "histogram", "triggers"} < set(line)


def test_the_page_shows_triggers_tokens_and_neighbors(client: TestClient, index: Index) -> None:
    text = client.get("/m/L1N7").text
    assert text.count("<li data-rank=") == len(index.triggers("L1N7"))
    assert 'href="/m/L1N6"' in text and 'href="/m/L1N8"' in text
    assert 'rel="prev"' not in client.get("/m/L0N0").text and 'href="/m/L1N0"' in client.get("/m/L0N39").text
    assert 'rel="next"' not in client.get("/m/L2N39").text


def test_a_role_comes_with_its_numbers_and_a_gated_memory_with_its_quadrants(
    client_of: ClientOf, tiny_llama_index: Index, copy_of: Callable[..., Index]
) -> None:
    index = memlens.roles(copy_of(tiny_llama_index), rate=0.99)
    first = next(row for row in index.table("roles").to_pylist() if set(row["roles"]) - {"dead"})
    record = read_memory(index, f"L{first['layer']}N{first['memory']}")
    page = client_of(index).get(f"/m/{record.name}").text
    assert record.roles is not None and record.roles.behind
    for name, value in record.roles.behind.items():
        assert value == first[name] and f"{name.replace('_', ' ')} " in page
    assert record.quadrants is not None
    for own in record.quadrants:
        assert f"<b>{own.quadrant}</b> gate {'above' if own.quadrant[0] == '+' else 'below'} 0" in page


def test_other_spellings_redirect_to_one_address(client: TestClient) -> None:
    for name in ("l1n7", "L1D7", "L01N007"):
        answer = client.get(f"/m/{name}", follow_redirects=False)
        assert answer.status_code == 308 and answer.headers["location"] == "/m/L1N7"
    assert client.get("/m/L0N0?end=middle").status_code == 422
    kept = client.get("/m/l1n7?end=bottom&related=yes", follow_redirects=False)
    assert kept.headers["location"] == "/m/L1N7?end=bottom&related=yes"


@pytest.mark.parametrize("name", ["L9N0", "L0N999", "river", "L-1N0", "L0N99999999999", "%00", "L0N0.json"])
def test_an_unknown_memory_is_one_line(client: TestClient, name: str) -> None:
    page = client.get(f"/m/{name}")
    assert page.status_code == 404 and 'class="standfirst"' in page.text
    for path in (f"/api/memories/{name}", f"/api/memories/{name}/related", f"/api/memories/{name}/coefficients"):
        answer = client.get(path)
        assert answer.status_code == 404 and set(answer.json()) == {"error"}


def test_corpus_text_is_shown_as_text(client: TestClient, index: Index) -> None:
    """Some memory has the hostile sentences among its triggers; on its page they are words."""
    rows = index.sql("SELECT sentence FROM {corpus} WHERE contains(text, '<script>') OR contains(text, 'turned')")
    ids = ", ".join(str(row["sentence"]) for row in rows)
    hosts = index.sql(f"SELECT DISTINCT layer, memory FROM {{triggers}} WHERE sentence IN ({ids}) LIMIT 12")
    assert hosts
    texts = [client.get(f"/m/L{row['layer']}N{row['memory']}").text for row in hosts]
    assert any("&lt;script&gt;" in text for text in texts)
    for text in texts:
        assert "<script>alert" not in text and "<b>bold" not in text
        assert not set("\u202e\u2028\x07") & set(text)


def test_related_memories_are_those_of_the_patterns(client: TestClient, index: Index) -> None:
    found = client.get("/api/memories/L1N7/related?limit=5").json()
    expected = related_memories(index, "L1N7", 5)
    assert [(one["name"], one["triggers"], one["tokens"]) for one in found] == [
        (str(one.name), one.triggers, one.tokens) for one in expected
    ]
    assert all(f'href="/m/{one["name"]}"' in client.get("/m/L1N7?related=yes").text for one in found)


def test_nearest_memories_and_contexts_are_those_of_the_library_and_show_prints_them(
    client: TestClient, index: Index, model: MemoryModel, model_folder: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    for by in SIDES:
        found = client.get(f"/api/memories/L1N7/nearest?by={by}&limit=5").json()
        assert found == [plain(one) for one in nearest_memories(index, model, "L1N7", by, 5)]
    shown = json.loads(run("show", index.folder, "L1N7", "--nearest", "--model", model_folder, "--json")[1])
    assert shown["value"][:5] == client.get("/api/memories/L1N7/nearest?by=value&limit=5").json()
    trigger = index.triggers("L1N7")[3]
    context = client.get(f"/api/sentences/{trigger.prefix.sentence}").json()
    assert context == plain(read_context(index, trigger.prefix.sentence))
    page = client.get("/m/L1N7?context=3").text
    assert page.count('<blockquote class="context">') == 1 and context["source"] in page
    assert client.get("/api/sentences/999999").status_code == 404


def test_scores_lie_on_one_axis_from_the_lowest_to_the_highest_token(client: TestClient, index: Index) -> None:
    value = read_memory(index, "L1N7").value
    assert value is not None and value.histogram is not None
    axis = score_axis(value)
    assert axis is not None and axis.low == value.demotes[0].score and axis.high == value.promotes[0].score
    assert axis.share(axis.low) == 0 and axis.share(axis.high) == 100 and 0 < axis.share(0) < 100
    assert len(axis.bars) == len(value.histogram) and sum(value.histogram) == index.manifest.model.vocabulary
    assert axis.bars[-1].x + axis.bars[-1].width == pytest.approx(320, abs=1)
    assert client.get("/m/L1N7").text.count("<rect") >= len(axis.bars)
    unlike = replace(value, histogram=None)
    assert score_axis(unlike) == replace(axis, bars=())  # a table of an earlier version
    same = tuple(replace(one, score=0.0) for one in value.promotes)
    assert score_axis(replace(value, promotes=same, demotes=same)) is None


def test_values_without_a_histogram_are_shown(own_index: Index, client_of: ClientOf) -> None:
    table = own_index.table("values").drop_columns(["histogram"])
    own_index.write({"values": (table.schema, [table])}, dict)
    text = client_of(own_index).get("/m/L1N7").text
    assert (
        "does not contain the distribution of scores" in text and "scores-of-tokens" not in text and "Demotes" in text
    )


def test_labels_of_people_who_have_finished_are_shown(own_index: Index, client_of: ClientOf) -> None:
    annotations = Annotations(own_index)
    pattern = LabeledPattern("about <i>rivers</i>", "semantic", (0, 1, 2))
    annotations.save(*(Label(person, MemoryId(1, 7), (pattern,)) for person in ("Ada", "Ben")))
    opened = client_of(own_index)
    assert "labels-title" not in opened.get("/m/L1N7").text  # nobody has finished
    annotations = Annotations(own_index)
    annotations.finish("Ada")
    text = opened.get("/m/L1N7").text
    assert "labels-title" in text and "Ada" in text and "Ben" not in text
    assert "about &lt;i&gt;rivers" in text and "<i>rivers" not in text
    assert "labels-title" not in opened.get("/m/L1N8").text


def test_looking_makes_no_file(own_index: Index, client_of: ClientOf) -> None:
    before = sorted(path.name for path in own_index.folder.rglob("*"))
    opened = client_of(own_index)
    for path in ("/", "/m/L0N0", "/search?q=river", "/api/memories/L0N0/related"):
        assert opened.get(path).status_code == 200
    assert sorted(path.name for path in own_index.folder.rglob("*")) == before


def test_live_coefficients_are_those_of_a_bare_forward_pass(
    client: TestClient, index: Index, model: MemoryModel
) -> None:
    memory = MemoryId(2, 11)
    found = client.get(f"/api/memories/{memory}/coefficients").json()
    triggers = index.triggers(memory)
    assert len(found) == len(triggers) > 5
    for one, trigger in zip(found, triggers, strict=True):
        sentence = index.sentences([trigger.prefix.sentence])[trigger.prefix.sentence]
        tokens = sentence["tokens"][: trigger.prefix.position + 2]
        seen: list[torch.Tensor] = []
        with model.watch(lambda _, block, seen=seen: seen.append(block.everywhere()), [2]):
            model.run_body(torch.tensor([tokens]))
        assert one["coefficients"] == pytest.approx(seen[0][0, :, 11].tolist(), abs=1e-5)
        assert one["coefficients"][one["position"]] == pytest.approx(trigger.coefficient, abs=1e-5)
        assert "".join(one["tokens"][: one["position"] + 1]) == trigger.text


def test_silencing_is_an_intervention(client: TestClient, model: MemoryModel) -> None:
    for change in ("0", "x3", "2.5"):
        body = {"prompt": "The river runs to the", "change": change}
        found = client.post("/api/memories/L1N7/silence", json=body).json()
        expected = intervene(model, "The river runs to the", f"L1N7={change}", top=8)
        assert found["kl"] == pytest.approx(expected.kl, abs=1e-6)
        assert [one["id"] for one in found["after"]["layers"][-1]["output"]] == [
            one.id for one in expected.after.layers[-1].output
        ]
        assert found["changes_prediction"] == expected.changes_prediction


CANNOT_BE: list[tuple[object, int]] = [
    ({"prompt": ""}, 422), ({}, 422), ([], 422), ({"prompt": "river " * 300}, 422), (b"{", 422), (b"[" * 5000, 400),
    *[({"prompt": "The river", "change": change}, 422) for change in ("much", "nan", "1e999")],
    (b'{"prompt": "\\ud800"}', 422), (b'{"prompt": "\xff"}', 400),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status"), CANNOT_BE)
def test_an_invalid_change_is_one_line(client: TestClient, body: object, status: int) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/api/memories/L1N7/silence", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status and set(answer.json()) == {"error"} and "\n" not in answer.json()["error"]


def test_without_a_model_the_page_works_and_says_how_to_load_it(index: Index, client_of: ClientOf) -> None:
    alone = client_of(index)
    assert alone.get("/api/status").json()["status"] == "none"
    text = alone.get("/m/L1N7").text
    assert "memlens serve" in text and "--model" in text and "silence-form" not in text
    assert alone.get("/api/memories/L1N7/coefficients").status_code == 409
    assert alone.post("/api/memories/L1N7/silence", json={"prompt": "a"}).status_code == 409


def test_a_model_that_cannot_be_loaded_is_one_line(index: Index, client_of: ClientOf, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    opened = client_of(index, str(tmp_path))
    wait_until(lambda: opened.get("/api/status").json()["status"] == "failed", "loading fails")
    assert "\n" not in opened.get("/api/status").json()["text"]
    for path in ("/", "/m/L1N7", "/search?q=river", "/trace", "/steer", "/collections", "/annotate", "/compare"):
        page = opened.get(path)
        assert page.status_code == 200 and "could not be loaded" in unescape(page.text), path
    for path in ("/api/map", "/api/memories/L1N7", "/api/search?q=river", "/api/sentences/0", "/random"):
        assert opened.get(path).status_code == 200, path
    refused = opened.get("/api/memories/L1N7/nearest")
    assert refused.status_code == 409 and "could not be loaded" in refused.json()["error"]


def test_a_histogram_is_drawn_between_its_filled_bins() -> None:
    drawn = draw_histogram([0, 4, 0, 1, 0], [-1.0, 0.0, 1.0, 2.0])
    assert drawn is not None and len(drawn.bars) == 3
    assert [round(bar.height) for bar in drawn.bars] == [72, 0, 36]
    assert drawn.bars[0].title == "−1 to 0: 4 of 5" and [mark for _, mark in drawn.marks] == ["0", "1"]
    assert draw_histogram([0, 0], [1.0]) is None and draw_histogram([], []) is None
    both = draw_histogram([1, 1], [0.5])
    assert both is not None and [bar.title for bar in both.bars] == ["below 0.5: 1 of 2", "0.5 and above: 1 of 2"]
