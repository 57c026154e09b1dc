"""The page of an expert, and unused experts in the workbench and the report."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import memlens
from memlens.index.memory import read_expert, read_memory, read_routing
from memlens.index.reader import Index
from memlens.reports.report import make_report
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.vocab.table import compute_values
from memlens.web.app import create_app
from memlens.web.workbench import Workbench


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """So little text that some experts are never chosen."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "text.txt").write_text("The river.\n", encoding="utf-8")
    model = memlens.load(tiny_model("qwen2_moe"), tokenizer=tiny_tokenizer())
    found = memlens.scan(model, folder / "text.txt", out=folder / "index", top=5, threads=1, unit="line")
    compute_values(found, model, top=5)
    return found


@pytest.fixture(scope="module")
def client(index: Index) -> Iterator[TestClient]:
    with TestClient(create_app(Workbench(index.folder)), base_url="http://localhost") as found:
        yield found


def test_routing_is_what_the_records_of_all_experts_say(index: Index) -> None:
    found = read_routing(index)
    assert [layer.layer for layer in found] == sorted(
        {row["layer"] for row in index.sql("SELECT layer FROM {experts}")}
    )
    for layer in found:
        experts = [read_expert(index, f"L{layer.layer}E{number}") for number in range(layer.experts)]
        shares = [expert.share or 0.0 for expert in experts]
        assert layer.top_k == pytest.approx(sum(shares)) and layer.busiest_share == max(shares)
        assert list(layer.never) == [expert.name for expert in experts if expert.chosen == 0]
        assert layer.unreached == sum(expert.memories for expert in experts if expert.chosen == 0)
        even = sum(shares) / layer.experts
        assert list(layer.rarely) == [one.name for one in experts if 0 < (one.share or 0.0) < even / 10]
    layer = next(layer for layer in found if layer.unreached)
    names = [index.names.name(layer.layer, number) for number in range(index.memories(layer.layer))]
    assert layer.unreached == sum(read_memory(index, name).seen == 0 for name in names)


def test_used_shared_and_unused_experts_have_pages(index: Index, client: TestClient) -> None:
    routing = next(layer for layer in read_routing(index) if layer.never)
    for name, words in (
        (routing.busiest, "of all prefixes are routed to this expert"),
        (f"L{routing.layer}S0", "It processes every token"),
        (routing.never[0], "never used"),
    ):
        answer, record = client.get(f"/e/{name}"), read_expert(index, str(name))
        assert answer.status_code == 200 and words in answer.text
        assert all(f"/m/{memory.name}" in answer.text for memory in record.strongest)
        told = client.get(f"/api/experts/{name}").json()
        assert (told["name"], told["chosen"], told["dead"]) == (str(name), record.chosen, record.dead)
    assert client.get(f"/api/experts/{routing.busiest}").json()["router"]
    reached, missed = (f"{client.get(f'/m/{name}N0').text}" for name in (routing.busiest, routing.never[0]))
    assert f'href="/e/{routing.busiest}"' in reached and "never reached" not in reached
    assert "never reached" in missed and ">dead<" not in missed


def test_other_spellings_redirect_and_unknown_experts_are_refused(index: Index, client: TestClient) -> None:
    busiest = str(read_routing(index)[0].busiest)
    for address in (f"/e/{busiest.lower()}", f"/search?q={busiest}"):
        answer = client.get(address, follow_redirects=False)
        assert answer.status_code in (303, 308) and answer.headers["location"] == f"/e/{busiest}"
    for name in ("L0E999", "L99E0", "nonsense"):
        assert client.get(f"/e/{name}").status_code == 404, name


def test_overview_and_report_distinguish_unreached_from_dead_memories(
    index: Index, client: TestClient, tmp_path: Path
) -> None:
    routing = read_routing(index)
    unreached = sum(layer.unreached for layer in routing)
    report = make_report(index, tmp_path / "report.html").read_text(encoding="utf-8")
    for page in (client.get("/").text, report):
        assert f"{unreached:,} " in page and "their coefficients were never computed" in page
        assert all(str(layer.never[0]) in page for layer in routing if layer.never)
