"""A small server of the Hugging Face Hub's endpoints that this project uses, over repositories held in memory.

    GET  /api/{models,datasets}/ORG/NAME[/revision/REV]     commit and file names
    GET  /api/{models,datasets}/ORG/NAME/tree/REV           the files with sizes
    HEAD, GET  [/datasets]/ORG/NAME/resolve/REV/FILE        a file
    POST /api/repos/create, .../preupload/REV, .../commit/REV   a push

As huggingface.co answers them and huggingface_hub asks. What it was asked is in `requests`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    token: str = ""
    """Who asks has to have it; "": nobody is asked."""

    @property
    def commit(self) -> str:
        whole = hashlib.sha1()
        for name, data in sorted(self.files.items()):
            whole.update(name.encode() + b"\0" + data)
        return whole.hexdigest()


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By `models/ORG/NAME` and `datasets/ORG/NAME`."""
    past: dict[str, dict[str, Repository]] = field(default_factory=dict)
    """Earlier commits and tags of a repository."""
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""

    def do_HEAD(self) -> None:
        self._look()

    def do_GET(self) -> None:
        self._look()

    def do_POST(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.requests.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            id = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            hub.repositories.setdefault(f"models/{id}", Repository({}))
            return self._json({"url": f"{hub.url}/{id}"})
        name, verb = "/".join(parts[1:4]), parts[4]
        if verb == "preupload":
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for f in json.loads(body)["files"]]  # fmt: skip
            return self._json({"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                hub.repositories[name].files[value["path"]] = base64.b64decode(value["content"])
        commit = hub.repositories[name].commit
        return self._json({"commitUrl": f"{hub.url}/{'/'.join(parts[2:4])}/commit/{commit}", "commitOid": commit,
                           "success": True})  # fmt: skip

    def _look(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.requests.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts if parts[0] == "datasets" else ["models", *parts]
        name, rest = "/".join(parts[:3]), parts[3:]
        found = hub.repositories.get(name)
        if found is None or (found.token and self.headers.get("Authorization") != f"Bearer {found.token}"):
            return self._refuse(401, "RepoNotFound")
        if found.gated and not self.headers.get("Authorization"):
            return self._refuse(403, "GatedRepo")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", found.commit):
            found = hub.past.get(name, {}).get(revision)
            if found is None:
                return self._refuse(404, "RevisionNotFound")
        match rest[:1]:
            case [] | ["revision"]:
                siblings = [{"rfilename": file} for file in found.files]
                return self._json({"id": "/".join(parts[1:3]), "sha": found.commit, "siblings": siblings, "tags": [],
                                   "private": False, "downloads": 0, "likes": 0})  # fmt: skip
            case ["tree"]:
                tree = [{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for file, data in found.files.items()]  # fmt: skip
                return self._json(tree)
        file = "/".join(rest[2:])
        if file not in found.files:
            return self._refuse(404, "EntryNotFound")
        return self._answer(200, found.files[file], found.commit)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), "", kind="application/json")

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"", "", error=code)

    def _answer(self, status: int, data: bytes, commit: str, *, kind: str = "", error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", kind or "application/octet-stream")
        if error:
            self.send_header("X-Error-Code", error)
        if commit:
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
