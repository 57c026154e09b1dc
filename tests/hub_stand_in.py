"""A small HTTP server that implements the parts of the Hub's API that memlens uses: repositories, commits, files.

Files are stored by commit, and large ones by their SHA-256. `requests` lists all requests. From request `fail_at` on,
the server closes each connection; from `silent_at` on, it does not answer. `damage` changes a stored file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LARGE = (".parquet", ".html")


@dataclass
class Hub:
    """The state of the stand-in."""

    address: str = ""
    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)  # by repository, oldest first
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fail_at: int | None = None
    silent_at: int | None = None
    closing: Event = field(default_factory=Event)
    status: int | None = None  # of every answer, if set
    lock: Lock = field(default_factory=Lock)

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        commits = self.commits.setdefault(repo, [])
        names = sorted((name, hashlib.sha256(content).hexdigest()) for name, content in files.items())
        sha = hashlib.sha1(json.dumps([len(commits), names]).encode()).hexdigest()
        commits.append((sha, dict(files)))
        return sha

    def at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.commits.get(repo, [])
        if revision == "main":
            return commits[-1] if commits else None
        return next((commit for commit in commits if commit[0] == revision), None)

    def damage(self, repo: str, name: str, content: bytes) -> None:
        """Replace the bytes of one file in the latest commit."""
        self.commits[repo][-1][1][name] = content


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def answer(self) -> None:
        body = self.rfile.read(size := int(self.headers.get("content-length") or 0))
        if len(body) < size:  # the client closed the connection
            self.close_connection = True
            return
        if self.hub.silent_at is not None and len(self.hub.requests) >= self.hub.silent_at:
            self.hub.closing.wait()
            self.close_connection = True
            return
        with self.hub.lock:
            number = len(self.hub.requests)
            self.hub.requests.append(f"{self.command} {self.path}")
            if self.hub.fail_at is not None and number >= self.hub.fail_at:
                self.close_connection = True
                self.connection.close()
                return
            if self.hub.status is not None:
                return self.send(self.hub.status, {"error": "refused"})
            path = unquote(urlsplit(self.path).path)
            for pattern, act in ROUTES:
                match = re.fullmatch(pattern, f"{self.command} {path}")
                if match:
                    return act(self, body, *match.groups())
            self.send(404, {"error": f"no such address: {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815

    def send(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in {"content-type": kind, "content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass

    def missing(self, code: str, text: str) -> None:
        self.send(404, {"error": text}, {"x-error-code": code, "x-error-message": text})

    def create(self, body: bytes) -> None:
        told = json.loads(body)
        repo = f"{told.get('organization') or 'me'}/{told['name'].rpartition('/')[2]}"
        if repo in self.hub.commits:
            return self.send(409, {"error": "exists", "url": f"{self.hub.address}/datasets/{repo}"})
        self.hub.commit(repo, {".gitattributes": b""})
        self.send(200, {"url": f"{self.hub.address}/datasets/{repo}"})

    def yaml(self, _body: bytes) -> None:
        self.send(200, {"errors": [], "warnings": []})

    def info(self, _body: bytes, repo: str, revision: str | None) -> None:
        if repo not in self.hub.commits:
            return self.missing("RepoNotFound", "Repository not found")
        found = self.hub.at(repo, revision or "main")
        if found is None:
            return self.missing("RevisionNotFound", "Invalid rev id")
        siblings = [{"rfilename": name} for name in sorted(found[1])]
        self.send(200, {"id": repo, "sha": found[0], "siblings": siblings, "tags": [], "private": False})

    def tree(self, _body: bytes, repo: str, revision: str) -> None:
        found = self.hub.at(repo, revision)
        if found is None:
            return self.missing("RevisionNotFound", "Invalid rev id")
        self.send(200, [tree_entry(name, content) for name, content in sorted(found[1].items())])

    def preupload(self, body: bytes, repo: str) -> None:
        files = json.loads(body)["files"]
        told = [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
             "shouldIgnore": False, "oid": None}
            for one in files
        ]  # fmt: skip
        self.send(200, {"files": told})

    def batch(self, body: bytes, _repo: str) -> None:
        objects = [
            {"oid": one["oid"], "size": one["size"]}
            | ({} if one["oid"] in self.hub.blobs else {"actions": {"upload": {"href": self.upload(one["oid"])}}})
            for one in json.loads(body)["objects"]
        ]
        self.send(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> str:
        return f"{self.hub.address}/blobs/{oid}"

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.send(400, {"error": "not these bytes"})
        self.hub.blobs[oid] = body
        self.send(200, {})

    def change(self, body: bytes, repo: str) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        latest = self.hub.at(repo, "main")
        assert latest is not None
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != latest[0]:
            return self.send(412, {"error": "a commit has happened since"})
        files = dict(latest[1])
        for line in lines[1:]:
            kind, told = line["key"], line["value"]
            if kind == "file":
                files[told["path"]] = base64.b64decode(told["content"])
            elif kind == "lfsFile":
                files[told["path"]] = self.hub.blobs[told["oid"]]
            elif kind == "deletedFile":
                del files[told["path"]]
        sha = self.hub.commit(repo, files)
        self.send(
            200, {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.address}/datasets/{repo}/commit/{sha}"}
        )

    def resolve(self, _body: bytes, repo: str, revision: str, name: str) -> None:
        found = self.hub.at(repo, revision)
        if found is None:
            return self.missing("RevisionNotFound", "Invalid rev id")
        if name not in found[1]:
            return self.missing("EntryNotFound", "Entry not found")
        content = found[1][name]
        tag = hashlib.sha256(content).hexdigest()
        headers = {"x-repo-commit": found[0], "etag": f'"{tag}"', "accept-ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")
        if asked:
            first = int(asked[1])
            headers["content-range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self.send(206, content[first:], headers)
        self.send(200, content, headers)


def tree_entry(name: str, content: bytes) -> dict[str, Any]:
    """Return one file of a listing."""
    sha256 = hashlib.sha256(content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": sha256[:40]}
    return entry | ({"lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}} if name.endswith(LARGE) else {})


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, Any]] = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.yaml),
    (rf"GET /api/datasets/{REPO}(?:/revision/([^/]+))?", Handler.info),
    (rf"GET /api/datasets/{REPO}/tree/([^/]+)", Handler.tree),
    (rf"POST /api/datasets/{REPO}/preupload/main", Handler.preupload),
    (rf"POST /datasets/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /blobs/(\w+)", Handler.put),
    (rf"POST /api/datasets/{REPO}/commit/main", Handler.change),
    (rf"(?:GET|HEAD) /datasets/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
]


class Server(ThreadingHTTPServer):
    """A server that prints nothing about clients that were killed."""

    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*arguments)


@contextmanager
def running() -> Iterator[Hub]:
    """Run a stand-in on a free port of this machine inside the context."""
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()


@contextmanager
def connected(home: Path) -> Iterator[Hub]:
    """Run a stand-in that the Hub's client uses instead of the Hub, here and in processes started inside the block."""
    with running() as hub, pytest.MonkeyPatch.context() as patch:
        redirect_client(hub.address, home, patch)
        yield hub


def redirect_client(address: str, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the Hub's client of this process and of those that it starts use a stand-in."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HOME", str(home))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet has another protocol for large files
    patch.setenv("HF_TOKEN", "hf_of_the_tests")
    patch.setenv("HF_ENDPOINT", address)
    patch.setenv("HF_HUB_DISABLE_XET", "1")
    for module in ("utils._http", "file_download"):
        patch.setattr(f"huggingface_hub.{module}.time", Impatient())


class Impatient:
    """The module `time`, except that it does not wait between retries."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, _seconds: float) -> None:
        pass
