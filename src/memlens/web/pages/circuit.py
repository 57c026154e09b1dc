"""The Circuit page, its JSON, and the graph as a file. The page's address contains everything that the page shows.
circuit.js draws the graph. Only the script reads and writes `shown`, `focus` and `group` in the address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import StringConstraints

from memlens.errors import SettingError
from memlens.web.pages.memory import check_prompt_length
from memlens.web.pages.trace import EXAMPLES, Other, Prompt, Target, Text
from memlens.web.rendering import LIVE_PROBLEMS, Bench, page, run_model
from memlens.web.workbench import Workbench

if TYPE_CHECKING:
    from memlens.circuits.result import Circuit
    from memlens.models.memory_model import MemoryModel

router = APIRouter()

_MOST_NODES = 200
Nodes = Annotated[int, Query(ge=1, le=_MOST_NODES, description="Number of memories in the graph.")]
Groups = Annotated[
    list[Annotated[str, StringConstraints(max_length=5000)]],
    Query(
        alias="group",
        max_length=50,
        description="A group: the ids of its nodes, a bar and its name, like L3N51@2,L4N7@2|sea.",
    ),
]


async def find_circuit(
    request: Request, bench: Workbench, prompt: str, token: str, against: str, nodes: int
) -> Circuit:
    """Return the circuit of a prompt. Recent circuits are cached."""

    def find(model: MemoryModel) -> Circuit:
        from memlens.circuits.graph import circuit

        check_prompt_length(model, prompt, bench.live.prompt_tokens)
        target, other = (word.replace("␣", " ") or None for word in (token, against))
        return circuit(model, prompt, token=target, against=other, nodes=nodes, index=bench.index)

    return await run_model(request, bench, find, key=("circuit", prompt, token, against, nodes))


@router.get("/circuit", response_class=HTMLResponse, include_in_schema=False)
def circuit_page(
    request: Request, bench: Bench, prompt: Text = "", token: Target = "", against: Other = "", nodes: Nodes = 40
) -> HTMLResponse:
    asked: dict[str, Any] = {"prompt": prompt, "token": token, "against": against, "nodes": nodes}
    return page(request, "circuit.html", **asked, examples=EXAMPLES, files=(), most_nodes=_MOST_NODES)


@router.get("/api/circuit", responses=LIVE_PROBLEMS, tags=["circuit"])
async def read_circuit(
    request: Request, bench: Bench, prompt: Prompt, token: Target = "", against: Other = "", nodes: Nodes = 40
) -> dict[str, Any]:
    """Return the memories behind a prediction and the edges between them. Needs the model."""
    graph = await find_circuit(request, bench, prompt, token, against, nodes)
    return graph.to_json()


@router.get("/api/circuit/graph", responses=LIVE_PROBLEMS, tags=["circuit"])
async def save_circuit(
    request: Request,
    response: Response,
    bench: Bench,
    prompt: Prompt,
    token: Target = "",
    against: Other = "",
    nodes: Nodes = 40,
    groups: Groups = [],  # noqa: B006 - FastAPI copies it
) -> dict[str, Any]:
    """Return the circuit as an attribution graph for Neuronpedia and for `memlens site --circuit`. Needs the model."""
    from memlens.circuits.export import attribution_graph

    graph = await find_circuit(request, bench, prompt, token, against, nodes)
    response.headers["content-disposition"] = 'attachment; filename="circuit.json"'
    return attribution_graph(graph, read_groups(graph, groups))


def read_groups(graph: Circuit, groups: list[str]) -> dict[str, list[str]]:
    """Return the groups of nodes by name. Raises SettingError if a node does not exist."""
    known = {node.id for node in graph.nodes}
    by_name: dict[str, list[str]] = {}
    for text in groups:
        ids, _, name = text.removeprefix("-").partition("|")
        unknown = [node for node in ids.split(",") if node not in known]
        if unknown:
            raise SettingError(f"group '{name}': the circuit has no node '{unknown[0]}'")
        by_name[name or "group"] = ids.split(",")
    return by_name
