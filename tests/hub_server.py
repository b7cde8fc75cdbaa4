"""A loopback server for the part of the Hugging Face hub's HTTP protocol that reading data sets and models needs.

    with HubServer() as server:
        commit = server.commit("owner/name", {"data/train.jsonl": b"..."})
        # HF_ENDPOINT=server.endpoint
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/([^/]+))?$")
_TREE = re.compile(r"/api/(?:datasets|models)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?$")
_FILE = re.compile(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.*)$")


class HubServer:
    """A server of data sets and models, each with commits and the branch main; `requests` lists the requested paths."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.requests: list[str] = []
        self.refusal: tuple[int, str] | None = None
        """Status and X-Error-Code of every answer; None serves the data sets."""
        self.refusals: int | None = None
        """Number of answers that are still refused; None for all."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        """Add a commit with these files to main and return its hash."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name, commit] = dict(files)
        self.branches[name, "main"] = commit
        return commit

    def answer(self, path: str) -> tuple[int, str, Any]:
        """Return the status, the X-Error-Code and the JSON value or bytes of an answer."""
        if self.refusal and self.refusals != 0:
            self.refusals = None if self.refusals is None else self.refusals - 1
            return *self.refusal, b""
        for pattern, give in ((_INFO, self._info), (_TREE, self._tree), (_FILE, self._file)):
            if match := pattern.match(path):
                name, revision, *rest = (unquote(part or "") for part in match.groups())
                if (name, "main") not in self.branches:
                    return 404, "RepoNotFound", b""
                commit = self.branches.get((name, revision or "main"), revision)
                if (name, commit) not in self.commits:
                    return 404, "RevisionNotFound", b""
                return give(name, commit, *rest)
        return 404, "", b""

    def _info(self, name: str, commit: str) -> tuple[int, str, Any]:
        return 200, "", {"id": name, "sha": commit, "private": False, "disabled": False, "downloads": 0, "likes": 0,
                         "tags": [], "siblings": []}

    def _tree(self, name: str, commit: str, folder: str) -> tuple[int, str, Any]:
        files = self.commits[name, commit]
        inside = {path: data for path, data in files.items() if not folder or path.startswith(f"{folder}/")}
        if folder and not inside:
            return 404, "EntryNotFound", b""
        folders = sorted({str(parent) for path in inside for parent in PurePosixPath(path).parents} - {"."})
        entries = [{"type": "directory", "oid": "0", "size": 0, "path": path} for path in folders if path != folder]
        entries += [{"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
                    for path, data in sorted(inside.items())]
        return 200, "", entries

    def _file(self, name: str, commit: str, path: str) -> tuple[int, str, Any]:
        files = self.commits[name, commit]
        return (200, "", files[path]) if path in files else (404, "EntryNotFound", b"")


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(path)
        status, code, body = self.hub.answer(path)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        begin = 0
        if status == 200 and (part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            status, begin, data = 206, int(part[1]), data[int(part[1]) : int(part[2]) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json" if isinstance(body, list | dict) else "text/plain")
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(data) - 1}/{len(body)}")
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(data if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass
