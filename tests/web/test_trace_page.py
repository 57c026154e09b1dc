"""The page Trace and its JSON give the results of memlens.trace, and bad input is one line."""

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from own_server import parsed_command

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny, tiny_model, tiny_tokenizer
from memlens.tracer.intervene import intervene
from memlens.tracer.prompt import read_prompt
from memlens.tracer.trace import trace
from memlens.web.pages.trace import COLUMNS, MAX_CHARACTERS, TraceAddress, last_of_each, read_grid
from memlens.web.workbench import KeptPrompts
from waiting import wait_until

PROMPT = "The river runs to the sea"


def test_the_grid_is_what_tracing_every_position_gives(client: TestClient, model: MemoryModel) -> None:
    grid = client.get("/api/trace", params={"prompt": PROMPT}).json()
    count = len(grid["tokens"])
    assert "".join(grid["tokens"]) == PROMPT and len(grid["layers"]) == len(model.layers)
    for position in range(count):
        traced = trace(model, PROMPT, position, top=1)
        for layer, row in enumerate(grid["layers"]):
            cell, top = row[position], traced.layers[layer].output[0]
            assert (cell["id"], cell["text"]) == (top.id, top.text) and cell["p"] == pytest.approx(top.p, rel=1e-4)
            assert cell["settled"] == (layer >= traced.settled) and cell["was"] is None


def test_bos_is_fed_but_has_no_column() -> None:
    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(adds_bos=True))
    grid = read_grid(model, "The river", ["L1N3=9"])
    assert "".join(grid.tokens) == "The river"
    for position in range(len(grid.tokens)):
        compared = intervene(model, "The river", "L1N3=9", position, top=1)
        for layer, row in enumerate(grid.layers):
            assert row[position].id == compared.after.layers[layer].output[0].id


def test_a_cell_is_one_layer_of_a_trace_and_the_last(client: TestClient, model: MemoryModel) -> None:
    answer = client.get("/api/trace/cell", params={"prompt": PROMPT, "layer": 1, "at": 2}).json()
    expected = trace(model, PROMPT, 2, top=10).to_json()
    assert set(answer) == set(expected) and answer["token"]["id"] == expected["token"]["id"]
    assert [layer["layer"] for layer in answer["layers"]] == [1, 2] and answer["prefix"] == expected["prefix"]
    for layer in answer["layers"]:
        own = expected["layers"][layer["layer"]]
        assert set(layer) == set(own) and layer["case"] == own["case"]
        for state in ("residual", "ffn", "output"):
            assert [one["id"] for one in layer[state]] == [one["id"] for one in own[state]]
        assert [one["memory"] for one in layer["by_effect"]] == [one["memory"] for one in own["by_effect"]]
        assert layer["memories"] == pytest.approx(own["memories"], abs=1e-5)


def test_without_a_layer_the_one_whose_memories_contribute_most_is_opened(client: TestClient) -> None:
    whole = client.get("/api/trace/answer", params={"prompt": PROMPT}).json()["layers"]
    expected = max(whole, key=lambda layer: abs(layer["memories"]))["layer"]
    assert client.get("/api/trace/cell", params={"prompt": PROMPT}).json()["layers"][0]["layer"] == expected
    assert f"Layer {expected} after" in client.get("/trace", params={"prompt": PROMPT}).text


def test_edits_are_in_units_of_coefficients_and_change_the_grid(client: TestClient, model: MemoryModel) -> None:
    sets = ["L1N7=25", "L2N3=x-4", "L0=0"]
    answer = client.get("/api/trace/cell", params={"prompt": PROMPT, "set": sets}).json()
    effect = intervene(model, PROMPT, sets)
    assert answer["kl"] == pytest.approx(effect.kl, rel=1e-3) and answer["kl"] > 0
    assert answer["intervention"] == effect.intervention.to_json()
    assert answer["after"]["token"]["p"] == pytest.approx(effect.after.token.p, rel=1e-3)
    assert answer["before"]["prediction"]["id"] == effect.before.prediction.id
    plain = client.get("/api/trace", params={"prompt": PROMPT}).json()["layers"]
    grid = client.get("/api/trace", params={"prompt": PROMPT, "set": sets}).json()["layers"]
    assert grid[-1][-1]["id"] == effect.after.prediction.id
    for row, before in zip(grid, plain, strict=True):
        for cell, was in zip(row, before, strict=True):
            assert cell["was"] == (None if cell["id"] == was["id"] else was["text"])


def test_the_page_shows_grid_and_cell_and_links_that_keep_everything(client: TestClient) -> None:
    address = "/trace?prompt=The+river+runs&layer=1&at=0&set=L1N7%3D25"
    page = client.get(address)
    assert page.status_code == 200
    links = [html.unescape(link) for link in re.findall(r'class="cell[^"]*" href="([^"]+)"', page.text)]
    grid = client.get("/api/trace", params={"prompt": "The river runs"}).json()
    assert len(links) == len(grid["layers"]) * len(grid["tokens"])
    assert all("set=L1N7%3D25" in link and "prompt=The+river+runs" in link for link in links)
    assert page.text.count('aria-current="true"') == 1 and "Layer 1 after" in page.text
    assert client.get(links[-1]).status_code == 200
    part = client.get(address.replace("/trace?", "/trace/cell?")).text
    assert "<html" not in part and "Layer 1 after" in part


def test_a_number_in_a_form_becomes_an_edit_in_the_address(client: TestClient) -> None:
    query = {"prompt": PROMPT, "layer": 1, "at": 0, "set": "L0N1=0", "memory": "L1N7", "to": " 3.5 "}
    answer = client.get("/trace", params=query, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"].endswith("layer=1&at=0&set=L0N1%3D0&set=L1N7%3D3.5")
    assert answer.headers["location"].startswith("/trace?prompt=The+river")
    assert last_of_each(["L1N7=0", "L2N3=x2", "L1D7=3.25"]) == ["L2N3=x2", "L1D7=3.25"] and last_of_each([]) == []


EVIL = '<script>alert("x")</script>\u202e</textarea>"\x07'


@pytest.mark.parametrize("place", ["prompt", "set", "memory"])
def test_input_is_shown_as_text(client: TestClient, place: str) -> None:
    query = {"prompt": PROMPT} | {place: EVIL, "to": "1"}
    page = client.get("/trace", params=query)
    assert page.status_code in (200, 404, 422) and "<script>alert" not in page.text
    assert page.text.count("</textarea>") <= 1


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({"layer": 99}, 404, "layer 99 does not exist"),
        ({"at": 99}, 422, "position 99 is not in the prompt"),
        ({"at": "x"}, 422, "at"),
        ({"set": "L1N7"}, 422, "has no '='"),
        ({"set": "L1N7=nan"}, 422, "finite"),
        ({"set": "L1N4000=0"}, 404, "L1N4000 does not exist"),
        ({"set": ["L1N7=0"] * 501}, 422, "set"),
        ({"prompt": "the " * 200}, 422, "tokens"),
        ({"prompt": "x" * (MAX_CHARACTERS + 1)}, 422, "prompt"),
        ({"token": "no such token"}, 404, "is not one token"),
        ({"prompt": ""}, 422, "prompt"),
    ],
)
def test_bad_input_is_one_line_and_never_a_crash(
    client: TestClient, query: dict[str, Any], status: int, words: str
) -> None:
    query = {"prompt": PROMPT} | query
    answer = client.get("/api/trace/cell" if {"layer", "at", "token"} & query.keys() else "/api/trace", params=query)
    assert answer.status_code == status and words in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert client.get("/trace", params=query).status_code == (status if query["prompt"] else 200)


def test_an_invalid_edit_is_reported_and_the_valid_ones_stay(client: TestClient) -> None:
    answer = client.get("/trace", params={"prompt": PROMPT, "set": ["L1N7=25", "L1N4000=0", "L2=x2", "L1N7"]})
    assert answer.status_code == 422 and "L1N4000 does not exist" in answer.text and "has no &#39;=&#39;" in answer.text
    assert re.findall(r'class="edit"><code>([^<]+)', answer.text) == ["L1N7=25", "L2=x2"]
    assert 'class="cell' in answer.text


def test_without_the_model_the_page_says_how_to_load_it(
    client_of: Callable[..., TestClient], index_folder: Path, tmp_path: Path
) -> None:
    bare = client_of(index_folder)
    page = bare.get("/trace", params={"prompt": PROMPT})
    assert page.status_code == 200 and "memlens serve" in page.text and "--model MODEL" in page.text
    assert PROMPT in page.text  # nothing that was written is lost
    assert bare.get("/api/trace", params={"prompt": PROMPT}).status_code == 409
    failed = client_of(index_folder, str(tmp_path / "nowhere"))
    while failed.get("/api/status").json()["status"] == "loading":
        pass
    assert "could not be loaded" in failed.get("/trace").text


def test_while_the_model_loads_the_page_waits(
    client_of: Callable[..., TestClient], index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memlens.web.workbench.Workbench._load", lambda _self: None)  # it takes for ever
    page = client_of(index_folder, "some-model").get("/trace", params={"prompt": PROMPT})
    assert page.status_code == 200 and "The model is loading" in page.text and 'http-equiv="refresh"' in page.text


def test_the_answer_is_that_of_the_library_and_its_parts_add_up(client: TestClient, model: MemoryModel) -> None:
    asked = {"prompt": PROMPT, "at": 3, "token": "␣the", "against": "e"}
    answer = client.get("/api/trace/answer", params=asked).json()
    expected = trace(model, PROMPT, 3, " the", against="e")
    assert answer["token"]["text"] == " the" and answer["against"]["text"] == "e"
    assert answer["logit"] == pytest.approx(expected.logit, abs=1e-4)
    assert sum(answer["parts"].values()) == pytest.approx(answer["logit"])
    assert [one["memories"] for one in answer["layers"]] == pytest.approx(
        [one.memories for one in expected.layers], abs=1e-4
    )
    page = client.get("/trace", params=asked).text
    shown = re.findall(r'<th scope="row">([a-z ]+)</th><td>.*?</td><td class="right">([^<]+)</td>', page)
    assert dict(shown) == {
        name: f"{value:+.3f}".replace("-", "−")
        for name, value in (answer["parts"] | {"logit difference": answer["logit"]}).items()
        if value != 0
    }
    listed = re.findall(r'<li><a class="memory" href="/m/(L\d+N\d+)"', page)
    assert listed == [str(one.memory) for one in expected.memories[:10]]


def test_a_prompt_runs_once_for_all_cells_and_tokens(
    client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    run_body = model.run_body
    monkeypatch.setattr(model, "run_body", lambda *given: passes.append(1) or run_body(*given))
    client = client_of(index_folder, model)
    client.get("/trace", params={"prompt": PROMPT})
    for at in range(4):
        for layer in range(3):
            assert client.get("/trace/cell", params={"prompt": PROMPT, "at": at, "layer": layer}).status_code == 200
    assert client.get("/api/trace/answer", params={"prompt": PROMPT, "token": " the"}).status_code == 200
    assert len(passes) == 1
    client.get("/trace", params={"prompt": PROMPT, "set": "L1N7=25"})
    assert len(passes) == 2  # without the edit it was kept


@pytest.mark.parametrize(
    ("prompt", "token", "against", "at", "sets"),
    [
        ("The river", "", "", -1, []),
        ("-5 degrees", "", "", -1, ["L1N3=0"]),
        ("--", "--", "-1", -2, ["L1=-2", "L0N1=x0.5"]),
        ("--json", "␣it's", "␣$HOME", 1, []),
        ('it\'s `a` "b" $c\\ !d\n=e ␣f', "-", "=", 0, ["L1N3=0"]),
    ],
)
def test_the_command_of_a_trace_can_be_pasted_into_a_shell(
    prompt: str, token: str, against: str, at: int, sets: list[str]
) -> None:
    given = parsed_command(TraceAddress(prompt, None, at, sets, token, against).command("INDEX"))
    assert (given["model"], given["prompt"], given["position"], given["sets"]) == ("INDEX", prompt, at, sets)
    assert given["token"] == (token.replace("␣", " ") or None)
    assert given["against"] == (against.replace("␣", " ") or None)


def test_the_size_of_a_traced_prompt_is_that_of_its_tensors(model: MemoryModel) -> None:
    run = KeptPrompts().run(model, read_prompt(model, PROMPT))
    assert run.nbytes == sum(tensor.nbytes for tensor in tensors_in(vars(run.positions)))


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for part in content.values():
            yield from tensors_in(part)


def test_kept_prompts_stay_within_their_size(model: MemoryModel) -> None:
    kept = KeptPrompts(max_bytes=1)
    for text in ("one", "two", "three", "four"):
        kept.run(model, read_prompt(model, text))
    assert [text for text, _ in kept._runs] == ["three", "four"]
    assert [kept.answer(number % 300, lambda number=number: number) for number in range(600)][300:] == [
        *range(300, 600)
    ]


def test_a_long_prompt_is_shown_in_parts(client_of: Callable[..., TestClient], tmp_path: Path) -> None:
    long_model = memlens.load(tiny_model("gpt2", n_positions=600), tokenizer=tiny_tokenizer())
    corpus = tmp_path / "text.txt"
    corpus.write_text("The river runs to the sea.\n")
    index = memlens.scan(long_model, corpus, out=tmp_path / "index", top=2, threads=1)
    client = client_of(index.folder, long_model)
    prompt = "a" * 500
    grid = client.get("/api/trace", params={"prompt": prompt}).json()
    count = len(grid["tokens"])
    assert count == 500
    page = client.get("/trace", params={"prompt": prompt})
    assert page.status_code == 200 and f"of {count}." in page.text
    assert page.text.count('class="cell') == COLUMNS * len(grid["layers"])


def test_a_prompt_of_500_tokens_is_traced_and_its_last_cells_are_opened(
    tmp_path: Path, client_of: Callable[..., TestClient]
) -> None:
    folder = save_tiny(tmp_path / "long", "gpt2", n_positions=600)
    (tmp_path / "text.txt").write_text("The river runs to the sea.\n" * 3)
    index = memlens.scan(str(folder), tmp_path / "text.txt", out=tmp_path / "index", top=3, threads=1)
    client = client_of(index.folder, str(folder))
    wait_until(lambda: client.get("/api/status").json()["status"] == "ready", "the model is loaded")
    tokenizer = memlens.load(str(folder)).tokenizer
    text = "The river runs to the sea. " * 200
    prompt = text[: tokenizer.encode([text])[0].ends[499]]
    grid = client.get("/api/trace", params={"prompt": prompt}).json()
    assert len(grid["tokens"]) == 500 and {len(row) for row in grid["layers"]} == {500}
    page = client.get("/trace", params={"prompt": prompt, "layer": 1, "at": 499})
    assert page.status_code == 200 and 'data-at="499"' in page.text
    cell = client.get("/api/trace/cell", params={"prompt": prompt, "layer": 1, "at": 3}).json()
    assert cell["position"] == 3 and len(cell["prefix"]) == 4
