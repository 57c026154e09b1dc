"""Access: foreign names, other sites, people without the token; and what a page may do."""

from __future__ import annotations

import socket
from collections.abc import Callable

import anyio
import pytest
from fastapi.testclient import TestClient
from own_server import serving
from starlette.types import Message

from memlens.web.app import create_app
from memlens.web.pages import memory, search, steer, trace
from memlens.web.security import Access, is_local
from memlens.web.workbench import Workbench

SILENCE = "/api/memories/L0N0/silence"
BODY = {"prompt": "The river"}


@pytest.mark.parametrize("path", ["/", "/search", "/m/L0N0", "/trace", "/annotate", "/compare", "/api/status"])
def test_every_page_answers_with_a_strict_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy and "style-src 'self';" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_errors_have_the_same_policy(client: TestClient) -> None:
    for path in ("/nothing", "/m/L99N0", "/api/memories/no"):
        answer = client.get(path)
        assert answer.status_code == 404 and "default-src 'none'" in answer.headers["content-security-policy"]


def test_no_page_has_a_script_or_a_style_of_its_own(client: TestClient) -> None:
    for path in ("/", "/search?q=river", "/m/L0N0"):
        text = client.get(path).text
        assert "<script>" not in text and "<style" not in text and "javascript:" not in text and " onclick" not in text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "", "[::2]"])
def test_a_foreign_name_for_this_machine_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/api/status"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421 and "memories" not in answer.text


@pytest.mark.parametrize(
    "host",
    [
        *("[::1]x", "[::1]x:8000", "[::1", "[localhost]", "[127.0.0.1]", "[::1]:", "[::1]:80:80", "::1"),
        *("localhost:", "localhost:x", "localhost:80:80", "localhost:800000", "localhost/evil", "localhost evil"),
        "127.0.0.1@evil.example",
    ],
)
def test_what_only_begins_like_a_name_of_this_machine_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/status", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000"])
def test_this_machines_own_names_are_known(client: TestClient, host: str) -> None:
    assert client.get("/api/status", headers={"host": host}).status_code == 200


def test_what_a_foreign_name_was_is_shown_as_text(client: TestClient) -> None:
    answer = client.get("/", headers={"host": "<script>alert(1)</script>"})
    assert answer.status_code == 421 and "<script>" not in answer.text


def test_a_post_needs_the_secret_in_header_and_cookie(
    client_of: Callable[..., TestClient], workbench: Workbench, access: Access
) -> None:
    bare = TestClient(create_app(workbench, access), base_url="http://127.0.0.1:8000")
    assert bare.post(SILENCE, json=BODY).status_code == 403
    assert bare.post(SILENCE, json=BODY, headers={"x-memlens-csrf": access.csrf}).status_code == 403  # no cookie
    bare.get("/search")  # gives the cookie
    assert bare.post(SILENCE, json=BODY).status_code == 403  # no header
    assert bare.post(SILENCE, json=BODY, headers={"x-memlens-csrf": "wrong"}).status_code == 403
    assert bare.post(SILENCE, json=BODY, headers={"x-memlens-csrf": access.csrf}).status_code == 200
    assert bare.post(f"{SILENCE}?csrf={access.csrf}", json=BODY).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_post_from_another_site_is_refused_even_with_the_secret(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post(SILENCE, json=BODY, headers=headers).status_code == 403
    assert client.post(SILENCE, json=BODY, headers={"origin": "http://127.0.0.1:8000"}).status_code == 200


def test_json_is_not_for_other_sites_but_links_to_pages_work(client: TestClient) -> None:
    elsewhere = {"sec-fetch-site": "cross-site"}
    assert client.get("/api/counts", headers=elsewhere).status_code == 403
    assert client.get("/m/L0N0", headers=elsewhere).status_code == 200


def test_no_route_that_runs_the_model_answers_another_site(client: TestClient) -> None:
    asked = {"prompt": "The river", "text": "The river", "in": "fires", "q": "The river"}
    routes = [route for router in (trace.router, steer.router, search.router, memory.live) for route in router.routes]
    paths = {route.path.replace("{name}", "L0N0") for route in routes if "GET" in route.methods}  # type: ignore[attr-defined]
    assert {"/steer", "/api/steer", "/search", "/search/results", "/api/search", "/trace", "/api/fires"} <= paths
    for path in paths:
        answer = client.get(path, params=asked, headers={"sec-fetch-site": "cross-site"})
        assert answer.status_code == 403, path


PROMPT = {"prompt": "The river"}
LIVE_PATHS = ["/trace", "/trace/cell", "/api/trace", "/api/trace/cell", "/api/memories/L0N0/coefficients"]


@pytest.mark.parametrize("path", LIVE_PATHS)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-site", "referer": "http://127.0.0.1:8000/trace"}, 403),
        ({"sec-fetch-site": "something"}, 403),
        ({"referer": "https://evil.example/page"}, 403),
        ({"referer": "http://127.0.0.1:9999/"}, 403),
        ({"referer": "http://127.0.0.1:8000.evil.example/"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin", "referer": "http://127.0.0.1:8000/trace"}, 200),
        ({"referer": "http://127.0.0.1:8000/m/L0N0"}, 200),
        ({}, 200),
    ],
)
def test_no_other_site_keeps_the_model_at_work(
    client: TestClient, path: str, headers: dict[str, str], status: int
) -> None:
    assert client.get(path, params=PROMPT, headers=headers).status_code == status


def test_the_cookie_is_bound_to_this_site_and_port(workbench: Workbench) -> None:
    fresh = TestClient(create_app(workbench), base_url="http://127.0.0.1:8000")
    cookie = fresh.get("/search").headers["set-cookie"]
    assert "SameSite=Strict" in cookie and "HttpOnly" in cookie and cookie.startswith("memlens-csrf-8000=")


@pytest.mark.parametrize("foreign", ['state={"a": 1}', "path=1", "a b=c", "{}"])
def test_cookies_of_other_programs_on_this_machine_do_not_hide_ours(
    workbench: Workbench, access: Access, foreign: str
) -> None:
    bare = TestClient(create_app(workbench, access), base_url="http://127.0.0.1:8000")
    headers = {"x-memlens-csrf": access.csrf, "cookie": f"{foreign}; memlens-csrf-8000={access.csrf}"}
    assert bare.post(SILENCE, json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("size", [b"\xb2", b"9" * 5000, b"-1", b""])
def test_a_size_that_is_no_number_is_refused(client: TestClient, size: bytes) -> None:
    assert client.post(SILENCE, json=BODY, headers={"content-length": size}).status_code == 413


def test_beyond_this_machine_a_token_is_needed(workbench: Workbench) -> None:
    access = Access.to("0.0.0.0")
    assert access.token and len(access.token) > 20
    remote = TestClient(create_app(workbench, access), base_url="http://192.0.2.7:8000", follow_redirects=False)
    for path in ("/", "/m/L0N0", "/static/style.css", "/api/status"):
        assert remote.get(path).status_code == 401
        assert remote.get(path, headers={"authorization": f"Bearer {access.token}"}).status_code == 200
    assert remote.get("/?token=wrong").status_code == 401
    welcome = remote.get(f"/search?q=a%20b&token={access.token}")
    assert welcome.status_code == 303 and welcome.headers["location"] == "/search?q=a+b"
    assert "HttpOnly" in welcome.headers["set-cookie"]
    assert remote.get("/").status_code == 200
    assert access.token not in remote.get("/").text


def test_the_token_never_leads_to_another_machine(workbench: Workbench) -> None:
    access = Access("0.0.0.0", "secret")
    remote = TestClient(create_app(workbench, access), base_url="http://192.0.2.7:8000", follow_redirects=False)
    for path in ("//evil.example/", "/\\evil.example"):
        answer = remote.get(f"http://192.0.2.7:8000{path}?token=secret")
        assert not answer.headers["location"].startswith(("//", "/\\", "http"))


def test_a_name_that_is_not_this_machines_is_refused_beyond_it_too() -> None:
    access = Access.to("0.0.0.0")
    assert access.knows("192.0.2.7") and access.knows("::1") and not access.knows("evil.example")
    assert not Access.to("127.0.0.1").knows("192.0.2.7")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False)],
)
def test_which_addresses_reach_this_machine_only(host: str, local: bool) -> None:
    assert is_local(host) is local and (Access.to(host).token is None) is local


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/m/..%2f..%2fetc"],
)
def test_no_path_of_a_request_reaches_the_file_system(client: TestClient, path: str) -> None:
    answer = client.get(f"http://127.0.0.1:8000{path}")
    assert answer.status_code == 404 and "import" not in answer.text and "root:" not in answer.text


def test_static_files_are_answered_once_and_then_known(client: TestClient) -> None:
    first = client.get("/static/base.js")
    assert first.status_code == 200 and first.headers["content-type"].startswith("text/javascript")
    again = client.get("/static/base.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


def test_a_request_that_is_too_large_is_refused_before_it_is_read(client: TestClient) -> None:
    assert client.post(SILENCE, json={"prompt": "x" * 1_000_000}).status_code == 413
    assert client.post(SILENCE, content=iter([b"{}"])).status_code == 413  # of unknown size


def exchange(address: str, request: bytes) -> bytes:
    """The server's answer to these bytes before it closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def head_of(address: str, *lines: str, method: str = "POST", path: str = SILENCE) -> bytes:
    host = address.removeprefix("http://")
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"host: {host}", *lines, "", ""]).encode()


CHUNKED = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "lines", "body"),
    [
        ("POST", ["content-length: 2", "transfer-encoding: chunked"], CHUNKED),
        ("POST", ["transfer-encoding: chunked", "content-length: 15"], CHUNKED),
        ("POST", ["content-length: 2", "content-length: 3"], b"{}"),
        ("POST", ["transfer-encoding: gzip, chunked"], CHUNKED),
        ("GET", ["content-length: 2"], b"{}"),
        ("GET", ["transfer-encoding: chunked"], CHUNKED),
    ],
)
def test_a_request_that_says_oddly_how_long_it_is_is_refused(
    address: str, method: str, lines: list[str], body: bytes
) -> None:
    answer = exchange(address, head_of(address, *lines, "connection: close", method=method) + body)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_bytes_are_counted_as_they_arrive(workbench: Workbench, access: Access) -> None:
    """After a million bytes a request is refused, whatever it says of its length, and no more is read."""
    headers = {"host": "127.0.0.1:8000", "x-memlens-csrf": access.csrf, "content-length": "2"}
    headers["cookie"] = f"memlens-csrf-8000={access.csrf}"
    read, answers = [], []

    async def receive() -> Message:
        read.append(1)
        return {"type": "http.request", "body": b" " * 100_000, "more_body": True}

    async def send(message: Message) -> None:
        answers.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": SILENCE,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    anyio.run(create_app(workbench, access), scope, receive, send)
    assert answers[0]["status"] == 413 and len(read) == 11


def test_a_body_that_does_not_come_is_refused(
    workbench: Workbench, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memlens.web.security._MOST_SECONDS", 0.2)
    with serving(workbench, access) as own:
        port = own.rpartition(":")[2]
        lines = [f"x-memlens-csrf: {access.csrf}", f"cookie: memlens-csrf-{port}={access.csrf}", "content-length: 20"]
        answer = exchange(own, head_of(own, *lines) + b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive in time" in answer


@pytest.mark.parametrize("sent", [b"", b"GET /api/status HTTP/1.1\r\nhost: 127", b"WHOLE"])
def test_a_connection_without_a_whole_request_is_closed(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("memlens.web.app._HEADERS_SECONDS", 0.3)
    with serving(workbench) as own:
        if sent == b"WHOLE":  # and the beginning of another, which ends uvicorn's own limit
            sent = head_of(own, method="GET", path="/api/status") + b"GET /api"
        answer = exchange(own, sent)  # comes back only when the server closes
    assert answer.count(b"HTTP/1.1 200") == sent.count(b"GET /api/status HTTP/1.1\r\nhost: 127.0.0.1:")


def test_odd_requests_are_no_news(workbench: Workbench, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(workbench) as own:
        for odd in (b"\x00\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n", head_of(own, "content-length: x")):
            assert exchange(own, odd).startswith(b"HTTP/1.1 400")
        upgrade = ["connection: upgrade, close", "upgrade: websocket", "sec-websocket-version: 13"]
        assert exchange(own, head_of(own, *upgrade, method="GET", path="/api/status"))
    assert capfd.readouterr().err == ""
