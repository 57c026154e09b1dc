"""Every JSON route is described, and no request gives a server error."""

from contextlib import suppress

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.web.app import create_app
from memlens.web.workbench import Workbench


@pytest.mark.parametrize("examples", [3, pytest.param(60, marks=pytest.mark.sweep)])
def test_no_request_gives_a_server_error(own_index: Index, model: MemoryModel, examples: int) -> None:
    """Send valid and invalid requests to every route."""
    few = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    workbench, host = Workbench(own_index, model), {"host": "127.0.0.1:8000"}
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", create_app(workbench), headers=host)
    seen: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @few
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                answer = case.call(headers=host)
                seen.setdefault(case.operation.label, set()).add(answer.status_code)
                assert answer.status_code < 500, f"{case.as_curl_command()} gave {answer.status_code}"

            with suppress(Unsatisfiable):  # a route without parameters has no invalid requests
                ask()
    workbench.close()
    assert len(seen) >= 10 and not any({401, 403, 421} & statuses for statuses in seen.values())
    assert any(200 in statuses for statuses in seen.values())


def test_every_json_route_has_a_description_and_a_schema(client: TestClient) -> None:
    paths = client.get("/api/openapi.json").json()["paths"]
    assert {"/api/map", "/api/search", "/api/memories/{name}", "/api/status"} <= set(paths)
    for path, methods in paths.items():
        assert path.startswith("/api/")
        for operation in methods.values():
            content = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert content and content != {}, path
            assert operation.get("description"), path
