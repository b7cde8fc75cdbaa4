"""The common part of the servers: buckets in memory, HTTP, and faults."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tidewheel.cluster.s3_faults import Faults

RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 seconds: close sends RST


@dataclass(frozen=True)
class Object:
    """A stored object."""

    data: bytes
    written: float = field(default_factory=time.time)

    @property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.data, usedforsecurity=False).digest()).decode()


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """An HTTP request with its whole body."""

    method: str
    path: str
    query: dict[str, str]
    headers: Any
    body: bytes


class ObjectServer:
    """A server in threads of this process, with environment variables that point clients at it.

    Args:
        faults: share of requests that fail, and the kinds of faults.
        accept_all: accept requests; False refuses every one.
    """

    kind: ClassVar[str]

    def __init__(self, faults: Faults | None = None, *, accept_all: bool = True) -> None:
        self.faults = faults or Faults(0.0)
        self.accept_all = accept_all
        self.buckets: dict[str, dict[str, Object]] = {}
        self.requests: list[str] = []
        """Method and path of each request."""
        self.counts: Counter[str] = Counter()
        """Faults so far, by kind."""
        self.lock = threading.RLock()
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        server = self

        class Handler(_Handler):
            owner = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        for name, value in {**self.variables(), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its URI."""
        self.buckets[name] = {}
        return f"{self.kind}://{name}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables that name this server."""
        raise NotImplementedError

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request. The caller holds the lock."""
        raise NotImplementedError

    def refusal(self, status: int, code: str) -> Answer:
        """Return an answer with an error."""
        raise NotImplementedError

    def draw(self, method: str, path: str) -> str:
        """Return the kind of fault of a request, or "" for none."""
        with self.lock:
            self.requests.append(f"{method} {path}")
            chance = random.Random(f"{self.faults.seed}/{len(self.requests)}")
            kind = chance.choice(self.faults.kinds) if chance.random() < self.faults.rate else ""
            self.counts[kind] += 1
        return kind


class _Handler(BaseHTTPRequestHandler):
    owner: ClassVar[ObjectServer]
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        server = self.owner
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, unquote(parts.path), query, self.headers, body)
        kind = server.draw(self.command, self.path)
        if kind == "reset_before":
            return self._reset()
        if kind in ("internal_error", "slow_down"):
            return self._send(server.refusal(500 if kind == "internal_error" else 503, "ServerBusy"))
        with server.lock:
            answer = server.answer(request) if server.accept_all else server.refusal(403, "AuthorizationFailure")
        if kind == "reset_after":
            return self._reset()
        if kind == "truncated":
            if len(answer.body) < 2 or self.command == "HEAD":
                return self._reset()
            self._send(answer, cut=len(answer.body) // 2)
            return self._reset(politely=True)
        self._send(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, answer: Answer, cut: int | None = None) -> None:
        self.send_response(answer.status)
        headers = {"Content-Length": str(len(answer.body)), **answer.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:cut])

    def _reset(self, politely: bool = False) -> None:
        self.close_connection = True
        if politely:
            self.connection.shutdown(socket.SHUT_WR)
            return
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        os.close(self.connection.detach())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Return [start, end) of a Range header "bytes=0-9" or "bytes=3-", or None when it starts after the end."""
    first, _, last = header.removeprefix("bytes=").partition("-")
    start = int(first)
    return None if start >= size else (start, min(size, int(last) + 1) if last else size)
