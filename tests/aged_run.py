"""The logs of a run that has trained for weeks, in an object store with latency that counts its requests.

    with AgedRun(days=30) as run:
        read_history(store(run.uri))
    run.requests  # number of requests that this took

Objects are generated when they are first read, since a month of logs is 1.5 GB.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tidewheel.jsonlog import FLUSH_SECONDS, SEGMENT_BYTES

DAY = 86_400
STEP_SECONDS = 1.0
GENERATION_SECONDS = 3 * 3600.0
"""A failure every three hours, the rate of Llama 3 on 16,384 GPUs."""
REDONE = 50
"""Steps that each generation repeats."""
BEGAN = 1_780_000_000.0
PAGE = 1_000
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
               "AWS_EC2_METADATA_DISABLED": "true"}


def batch_line(step: int, generation: int) -> bytes:
    return _line({"step": step, "digest": f"{step:032x}", "position": step * 1024, "count": 1024, "world_size": 1024,
                  "generation": generation})


def metrics_line(step: int, generation: int) -> bytes:
    return _line({"step": step, "generation": generation, "world_size": 1024, "tokens": step * 4_000_000, "loss": 2.5,
                  "gradient_norm": 0.1, "learning_rate": 3e-4, "step_seconds": 1.0, "data_wait_seconds": 0.001,
                  "tokens_per_second": 4e6, "tokens_per_second_per_worker": 4e3, "mfu": 0.41, "failed_saves": 0,
                  "host_resident_bytes": 10**10, "time": BEGAN + step})


def event_line(index: int, generation: int, *, seconds: float) -> bytes:
    kind = "failure" if index == 0 else "save"
    return _line({"time": BEGAN + seconds, "kind": kind, "detail": {"generation": generation, "step": index}})


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


class AgedRun:
    """A store that runs during a `with` block, in which the environment points at it.

    Args:
        days: days that the run has trained.
        latency: seconds before each answer.
        parts: use the layout of older versions, with one part for every flush.
        state: include `state.json`.
    """

    uri = "s3://aged/runs/x"

    def __init__(self, days: float, *, latency: float = 0.02, parts: bool = False, state: bool = True) -> None:
        self.latency, self.requests = latency, 0
        self.steps, self.generations = round(days * DAY / STEP_SECONDS), max(1, round(days * DAY / GENERATION_SECONDS))
        self.objects: dict[str, tuple[int, Callable[[], bytes]]] = {}
        fill = self._parts if parts else self._segments
        for log, line in (("batches.jsonl", batch_line), ("metrics.jsonl", metrics_line)):
            fill(log, line)
        self._events(parts)
        self._put("run.json", json.dumps({"started": BEGAN}).encode())
        if state:
            self._put("state.json", _line({"step": self.steps, "failures": self.generations - 1,
                                           "generation": self.generations - 1, "time": BEGAN + self.steps - 20}))
        self.keys = sorted(self.objects)
        self._lock = threading.Lock()
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> AgedRun:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"run": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        changed = {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}"}
        self._before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._server.shutdown()
        self._server.server_close()

    def count(self) -> None:
        with self._lock:
            self.requests += 1

    def _put(self, name: str, data: bytes) -> None:
        self.objects[f"runs/x/{name}"] = (len(data), lambda: data)

    def _lines(self, line: Callable[[int, int], bytes], generation: int, first: int, last: int) -> bytes:
        return b"".join(line(step, generation) for step in range(first, last))

    def _spans(self) -> list[tuple[int, int, int]]:
        """Return (generation, first step, step after the last) of each generation."""
        steps = self.steps / self.generations
        edges = [round(steps * index) for index in range(self.generations + 1)]
        return [(index, max(1, begin + 1 - REDONE), end + 1) for index, (begin, end) in enumerate(pairwise(edges))]

    def _segments(self, log: str, line: Callable[[int, int], bytes]) -> None:
        """Add a log's objects as `JsonLog` writes them."""
        size = len(line(self.steps, self.generations))
        steps = -(-SEGMENT_BYTES // size)
        for generation, first, last in self._spans():
            for index, begin in enumerate(range(first, last, steps)):
                end = min(last, begin + steps)
                name = f"runs/x/{log}/g{generation:012d}-000000-{generation:08x}-{index:06d}.jsonl"
                self.objects[name] = ((end - begin) * size, cache(partial(self._lines, line, generation, begin, end)))

    def _parts(self, log: str, line: Callable[[int, int], bytes]) -> None:
        """Add a log's objects as older versions wrote them."""
        steps = round(FLUSH_SECONDS / STEP_SECONDS)
        size = len(line(self.steps, self.generations))
        for generation, first, last in self._spans():
            for index, begin in enumerate(range(first, last, steps)):
                end = min(last, begin + steps)
                at = round((BEGAN + begin * STEP_SECONDS) * 1e9) + generation
                name = f"runs/x/{log}/{at:020d}-{generation:08x}-{index:06d}.jsonl"
                self.objects[name] = ((end - begin) * size, partial(self._lines, line, generation, begin, end))

    def _events(self, parts: bool) -> None:
        """Add each generation's events: a failure, then a save every minute."""
        for generation, first, last in self._spans():
            lines = [event_line(index, generation, seconds=first + 60.0 * index)
                     for index in range(1 + int((last - first) * STEP_SECONDS / 60))]
            if generation == 0:
                del lines[0]
            if not parts:
                self._put(f"events.jsonl/g{0:012d}-000000-{0:08x}-{generation:06d}.jsonl", b"".join(lines))
                continue
            for index, line in enumerate(lines):
                at = round((BEGAN + first + 60.0 * index) * 1e9)
                self._put(f"events.jsonl/{at:020d}-{0:08x}-{index:06d}.jsonl", line)


class _Answers(BaseHTTPRequestHandler):
    """Handler of GET, HEAD and ListObjectsV2 of the S3 protocol."""

    protocol_version = "HTTP/1.1"
    run: AgedRun

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        return

    def _answer(self, *, with_body: bool) -> None:
        self.run.count()
        time.sleep(self.run.latency)
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix("/aged").lstrip("/")
        if "list-type" in url.query:
            self._send(200, self._page(parse_qs(url.query)), "application/xml")
        elif not key:
            self._send(200, b"", "application/xml")
        elif key not in self.run.objects:
            body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
            self._send(404, body if with_body else b"", "application/xml")
        elif with_body:
            self._send(200, self.run.objects[key][1](), "binary/octet-stream")
        else:
            self._send(200, b"", "binary/octet-stream", length=self.run.objects[key][0])

    def _page(self, query: dict[str, list[str]]) -> bytes:
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        keys = [key for key in self.run.keys if key.startswith(prefix) and key > after]
        shown = keys[:min(PAGE, int(query.get("max-keys", ["1000"])[0]))]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{self.run.objects[key][0]}</Size><ETag>&quot;a&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for key in shown)
        more = len(keys) > len(shown)
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        return ("<?xml version='1.0'?><ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
                f"<Name>aged</Name><KeyCount>{len(shown)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
                f"{token}{entries}</ListBucketResult>").encode()

    def _send(self, status: int, body: bytes, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"a"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)


def start(uri: str, step: int) -> tuple[int, int, int]:
    """Read what a new driver and rank 0 of its first generation read of a run's past before they train from `step`.

    Returns:
        The furthest step, the number of failures, and the number of the previous generation.
    """
    from tidewheel.elastic.coordinator import Coordinator
    from tidewheel.storage import store
    from tidewheel.train.record import RunRecord, read_rollbacks

    past = Coordinator(uri).past()
    record = RunRecord(store(uri), past.generation + 1, past)
    assert record.started() == BEGAN
    assert read_rollbacks(record.store) == []
    assert not record.evaluated(step)
    return record.last_step(), record.failures(), past.generation
