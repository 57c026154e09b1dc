"""Access: foreign names, other sites, requests without the token, large bodies; and what a page may do."""

import pytest
from fastapi.testclient import TestClient

from memlens.web.app import create_app
from memlens.web.security import Access, is_local
from memlens.web.workbench import Workbench

SILENCE = "/api/memories/L0N0/silence"
BODY = {"prompt": "The river"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}


@pytest.mark.parametrize("path", ["/", "/m/L0N0", "/trace", "/api/status", "/nothing", "/m/L99N0"])
def test_every_page_has_a_strict_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy and "style-src 'self';" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_no_page_contains_scripts_or_styles(client: TestClient) -> None:
    for path in ("/", "/search?q=river", "/m/L0N0"):
        text = client.get(path).text
        assert "<script>" not in text and "<style" not in text and "javascript:" not in text and " onclick" not in text


FOREIGN = [
    *(
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8000",
        "",
        "[::2]",
        "<script>alert(1)</script>",
    ),
    *("[::1]x", "[::1]x:8000", "[::1", "[localhost]", "[127.0.0.1]", "[::1]:", "[::1]:80:80", "::1"),
    *("localhost:", "localhost:x", "localhost:80:80", "localhost:800000", "localhost/evil", "localhost evil"),
    "127.0.0.1@evil.example",
]


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_for_this_machine_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/api/status"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421 and "memories" not in answer.text and "<script>" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000"])
def test_names_of_this_machine_are_accepted(client: TestClient, host: str) -> None:
    assert client.get("/api/status", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "something"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "http://127.0.0.1:8000.evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        (LINK, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({}, 200),
    ],
)
def test_a_request_from_another_site_is_refused(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.post(SILENCE, json=BODY, headers=headers).status_code == status
    assert client.get("/api/trace", params=BODY, headers=headers).status_code == status


def test_a_link_from_another_site_opens_a_page_but_an_embedded_page_is_refused(client: TestClient) -> None:
    assert client.get("/m/L0N0", headers=LINK).status_code == 200
    for dest in ("iframe", "image", "empty"):
        assert client.get("/trace", params=BODY, headers=LINK | {"sec-fetch-dest": dest}).status_code == 403


@pytest.mark.parametrize("headers", [{"authorization": "Bearer wrong"}, {"cookie": "memlens-token-8000=wrong"}])
def test_a_wrong_token_is_refused(workbench: Workbench, headers: dict[str, str]) -> None:
    remote = TestClient(create_app(workbench, Access.for_host("0.0.0.0")), base_url="http://192.0.2.7:8000")
    assert remote.get("/", headers=headers).status_code == 401


def test_beyond_this_machine_a_token_is_needed(workbench: Workbench) -> None:
    access = Access.for_host("0.0.0.0")
    assert access.token and len(access.token) > 20
    remote = TestClient(create_app(workbench, access), base_url="http://192.0.2.7:8000", follow_redirects=False)
    for path in ("/", "/m/L0N0", "/static/style.css", "/api/status"):
        assert remote.get(path).status_code == 401
        assert remote.get(path, headers={"authorization": f"Bearer {access.token}"}).status_code == 200
    assert remote.get("/?token=wrong").status_code == 401
    welcome = remote.get(f"/search?q=a%20b&token={access.token}")
    assert welcome.status_code == 303 and welcome.headers["location"] == "/search?q=a+b"
    assert "HttpOnly" in welcome.headers["set-cookie"] and "memlens-token-8000=" in welcome.headers["set-cookie"]
    assert remote.get("/").status_code == 200
    assert access.token not in remote.get("/").text


@pytest.mark.parametrize("foreign", ['state={"a": 1}', "path=1", "a b=c", "{}"])
def test_cookies_of_other_programs_do_not_hide_ours(workbench: Workbench, foreign: str) -> None:
    remote = TestClient(create_app(workbench, Access("0.0.0.0", "secret")), base_url="http://192.0.2.7:8000")
    assert remote.get("/", headers={"cookie": f"{foreign}; memlens-token-8000=secret"}).status_code == 200


def test_the_token_never_leads_to_another_machine(workbench: Workbench) -> None:
    access = Access("0.0.0.0", "secret")
    remote = TestClient(create_app(workbench, access), base_url="http://192.0.2.7:8000", follow_redirects=False)
    for path in ("//evil.example/", "/\\evil.example"):
        answer = remote.get(f"http://192.0.2.7:8000{path}?token=secret")
        assert not answer.headers["location"].startswith(("//", "/\\", "http"))


def test_a_foreign_name_is_refused_beyond_this_machine_too() -> None:
    access = Access.for_host("0.0.0.0")
    assert access.allows_host("192.0.2.7:8000") and access.allows_host("[fe80::1]:80")
    assert not access.allows_host("evil.example") and not Access.for_host("127.0.0.1").allows_host("192.0.2.7")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False)],
)
def test_addresses_beyond_this_machine_get_a_token(host: str, local: bool) -> None:
    assert is_local(host) is local and (Access.for_host(host).token is None) is local


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/m/..%2f..%2fetc"],
)
def test_no_path_of_a_request_reaches_the_file_system(client: TestClient, path: str) -> None:
    answer = client.get(f"http://127.0.0.1:8000{path}")
    assert answer.status_code == 404 and "import" not in answer.text and "root:" not in answer.text


def test_static_files_are_sent_once(client: TestClient) -> None:
    first = client.get("/static/base.js")
    assert first.status_code == 200 and first.headers["content-type"].startswith("text/javascript")
    again = client.get("/static/base.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


def test_a_body_that_is_too_large_is_refused(client: TestClient) -> None:
    parts = iter([b" " * 600_000] * 2)
    answer = client.post(SILENCE, content=parts, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and "larger than" in answer.json()["error"]
