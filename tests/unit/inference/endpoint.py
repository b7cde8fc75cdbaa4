"""A judge behind OpenAI's chat completions, served on loopback."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Endpoint(ThreadingHTTPServer):
    """Prefers the shorter answer, or with "first" in the prompt whatever is first; fails as often as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.failures: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/chat/completions"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        code = self.server.failures.pop() if self.server.failures else 200
        text = body["messages"][0]["content"]
        first, second = (part.partition("\n\n")[0] for part in text.partition("[Answer A]\n")[2].split("[Answer B]\n"))
        letter = "A" if "first" in text.partition("[Answer A]")[0] or len(first) < len(second) else "B"
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": f" {letter}."}}]}).encode())

    def log_message(self, *_: object) -> None:
        return


@contextlib.contextmanager
def serving() -> Iterator[Endpoint]:
    """Serve an endpoint during the block."""
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
