"""Answer the requests of `engines.serving.process`: the side of the engine. It needs the standard library alone.

The two sides send lines of JSON over an inherited socket that has no name, so nobody else can connect:

    {"id": 1, "op": "load", "folder": PATH, "files": {NAME: SHA-256}, "weights": DIGEST, "settings": {...}}
    {"id": 2, "op": "complete", "weights": DIGEST, "prefixes": [{"tokens": [...], "most": 8, "seed": 1}, ...]}
    {"id": 3, "op": "health"}

A request gets any number of beats, {"id": 2, "beat": true}, and one answer: {"id": 2, "ok": {...}} or {"id": 2,
"error": {"reason": ..., "detail": ...}}. Weights are safetensors files; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

MISSING, UNSUPPORTED, DAMAGED, OTHER_WEIGHTS, FAILED = "missing", "unsupported", "damaged", "other_weights", "failed"
"""Reasons of errors: a package is not installed; the model or a setting is not supported; a file's hash differs; the
request is for other weights than those loaded; anything else."""
BEAT_SECONDS = 1.0
PARENT_SECONDS = 1.0
PR_SET_PDEATHSIG = 1
Beat = Callable[[], None]


class Refused(Exception):
    """A request that cannot be answered.

    Args:
        reason: one of the above.
        detail: for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Served(Protocol):
    """An engine, as this module calls it."""

    def load(self, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Serve the weights in a folder of Hugging Face's format; return what to tell of the engine."""
        ...

    def complete(self, prefixes: list[dict[str, Any]], beat: Beat) -> list[dict[str, Any]]:
        """Return {"tokens", "log_probabilities"} for each prefix; call `beat` now and then."""
        ...


def serve(engine: Served, descriptor: int) -> None:
    """Answer requests until the other side ends.

    Args:
        engine: does the work.
        descriptor: of the socket.
    """
    _end_with_parent()
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(ConnectionError):  # the other side has ended
        weights = ""
        for line in connection.makefile("rb"):
            request = json.loads(line)
            answer, weights = _answer(engine, request, weights, _Beats(connection, request["id"]))
            _send(connection, {"id": request["id"], **answer})


def _answer(engine: Served, request: dict[str, Any], weights: str, beat: Beat) -> tuple[dict[str, Any], str]:
    """Return the answer to a request, and the digest of the weights that are loaded then, "" for none."""
    loads = request["op"] == "load"
    try:
        ok = _answered(engine, request, weights, beat)
    except Exception as error:
        reason, detail = FAILED, f"{type(error).__name__}: {error}"
        if isinstance(error, Refused):
            reason, detail = error.reason, error.detail
        else:
            traceback.print_exc()
        return {"error": {"reason": reason, "detail": detail}}, "" if loads else weights
    return {"ok": ok}, request["weights"] if loads else weights


def _answered(engine: Served, request: dict[str, Any], weights: str, beat: Beat) -> dict[str, Any]:
    if request["op"] == "load":
        for name, expected in request["files"].items():
            if sha256(Path(request["folder"], name)) != expected:
                raise Refused(DAMAGED, f"the hash of {name} differs")
        return {"weights": request["weights"], **engine.load(request["folder"], request["settings"])}
    if request["op"] == "complete":
        if request["weights"] != weights:
            raise Refused(OTHER_WEIGHTS, f"{weights or 'no weights'} are loaded, not {request['weights']}")
        return {"weights": weights, "completions": engine.complete(request["prefixes"], beat)}
    return {"weights": weights}


class _Beats:
    """Tells the other side that a request is being worked on, at most once in `BEAT_SECONDS`."""

    def __init__(self, connection: socket.socket, request: int) -> None:
        self._connection, self._request = connection, request
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last >= BEAT_SECONDS:
            self._last = time.monotonic()
            _send(self._connection, {"id": self._request, "beat": True})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):  # `file_digest` needs Python 3.11, vLLM does not
            digest.update(block)
    return digest.hexdigest()


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, whatever this one does then."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
