"""An S3-protocol server that fails a given share of its requests on purpose: `S3Server(faults=...)` runs it.

It imitates faults of object stores and networks: internal errors, requests to slow down, connections that are reset
before or after the operation, and truncated bodies. On request it also stays silent, responds with one byte per second,
or claims that the bucket is in another region. The seed and the number of a request determine whether it fails.
`S3Server.fail` changes the faults while the server runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("internal_error", "slow_down", "reset_before", "reset_after", "truncated")
SLOW_KINDS = ("silent", "trickle")
"""The server accepts the request and never responds, or responds with one byte per second."""
ELSEWHERE = "elsewhere"
"""The bucket is in another region, `Faults.region`, and following the redirect does not help."""
COUNTS_PATH = "/-/faults"
"""GET: {"requests": n, kind: n ...}, PUT: the fields of `Faults`, as JSON. No bucket can have this name."""
HOLD_SECONDS = 600.0
"""A silent connection is closed after this time."""
TRICKLE_SECONDS = 1.0
_ANSWERS = {"internal_error": ("500 Internal Server Error", "InternalError", "We encountered an internal error."),
            "slow_down": ("503 Slow Down", "SlowDown", "Please reduce your request rate.")}
_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error>{}</Error>'
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 seconds: close sends RST

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True)
class Faults:
    """The share of requests that fail, and how."""

    rate: float = 0.05
    seed: int = 0
    kinds: Sequence[str] = KINDS
    expired_key: str = ""
    """Requests signed with this access key are refused: its session has expired."""
    region: str = ""
    """Requests signed for another region are refused, with the name of this one."""


class FaultyApp:
    """A WSGI application that wraps another one. It needs werkzeug's server, which gives it the socket."""

    def __init__(self, app: Wsgi, faults: Faults) -> None:
        self._app, self._faults = app, faults
        self._lock, self._counts = threading.Lock(), Counter({"requests": 0, **dict.fromkeys(faults.kinds, 0)})

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == COUNTS_PATH:
            return self._control(environ, start)
        faults = self._faults
        set_up = _makes_bucket(environ)
        kind = "" if set_up else self._draw(faults)
        if kind == "silent":
            time.sleep(HOLD_SECONDS)
            _reset(environ)
            return []
        if not set_up and (refusal := _refusal(environ, faults, kind)):
            _consume(environ)
            status, error, headers = refusal
            body = _ERROR.format(error).encode()
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), *headers])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
        if kind == "reset_before":
            _reset(environ)
            return []
        answer = self._app(environ, start)
        if kind == "trickle":
            return _trickle(answer)
        if kind == "reset_after":
            b"".join(answer)
            _reset(environ)
            return []
        return self._cut(answer, environ) if kind == "truncated" else answer

    def _control(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer with the counts; PUT changes the faults."""
        if environ["REQUEST_METHOD"] == "PUT":
            self._faults = Faults(**json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
        with self._lock:
            body = json.dumps(self._counts).encode()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _draw(self, faults: Faults) -> str:
        """Return the kind of fault of this request, "" for none."""
        with self._lock:
            self._counts["requests"] += 1
            chance = random.Random(f"{faults.seed}/{self._counts['requests']}")
            kind = chance.choice(faults.kinds) if chance.random() < faults.rate else ""
            if kind:
                self._counts[kind] += 1
        return kind

    def _cut(self, answer: Iterable[bytes], environ: dict[str, Any]) -> Iterator[bytes]:
        """Yield the first half of the body, then end the connection; without a body, reset it."""
        body = b"".join(answer)
        if len(body) > 1:
            yield body[:len(body) // 2]
        _reset(environ, kind=socket.SHUT_WR if len(body) > 1 else None)


def _refusal(environ: dict[str, Any], faults: Faults, kind: str) -> tuple[str, str, list[tuple[str, str]]] | None:
    """Return status, error and headers of a refusal, or None to let the request through."""
    if kind in _ANSWERS:
        status, code, message = _ANSWERS[kind]
        return status, f"<Code>{code}</Code><Message>{message}</Message>", []
    region = [("x-amz-bucket-region", faults.region)]
    if kind == ELSEWHERE:
        return "301 Moved Permanently", "<Code>PermanentRedirect</Code><Message>It is elsewhere.</Message>", region
    key, _, scope = _signature(environ).partition("/")
    if faults.expired_key and key == faults.expired_key:
        return ("400 Bad Request",
                "<Code>ExpiredToken</Code><Message>The provided token has expired.</Message>", [])
    if faults.region and key and f"/{faults.region}/" not in scope:
        return ("400 Bad Request", "<Code>AuthorizationHeaderMalformed</Code><Message>The region is wrong.</Message>"
                f"<Region>{faults.region}</Region>", region)
    return None


def _signature(environ: dict[str, Any]) -> str:
    """Return KEY/DATE/REGION/s3/aws4_request of a signed request, else ""."""
    _, _, rest = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")
    return rest.partition(",")[0]


def _trickle(answer: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the body, a byte at a time. Headers are sent with the first one."""
    for byte in b"".join(answer):
        time.sleep(TRICKLE_SECONDS)
        yield bytes([byte])


def _makes_bucket(environ: dict[str, Any]) -> bool:
    """Return whether the request creates a bucket, which never fails: it is part of a test's set-up."""
    return environ["REQUEST_METHOD"] == "PUT" and "/" not in environ["PATH_INFO"].strip("/")


def _consume(environ: dict[str, Any]) -> None:
    """Read the request to its end, so that the client gets the response and not a broken pipe."""
    with contextlib.suppress(ValueError):
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))


def _reset(environ: dict[str, Any], kind: int | None = None) -> None:
    connection = environ["werkzeug.socket"]
    with contextlib.suppress(OSError):
        if kind is None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            os.close(connection.detach())  # at once: close() waits for the server's other handles
        else:
            connection.shutdown(kind)


def serve(host: str, faults: Faults) -> None:
    """Serve moto behind faults on a free port until standard input closes; prints the port."""
    import sys

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app: Any = FaultyApp(DomainDispatcherApplication(create_backend_app), faults)
    server = make_server(host, 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
