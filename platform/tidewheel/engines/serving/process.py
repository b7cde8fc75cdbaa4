"""Engines in a process of another environment: started by that environment's Python, and asked over a socket.

The process gets weights as files that it can map: safetensors with the names of Hugging Face, in memory that processes
of a node share. It checks their hashes before it serves them, and names the version with each answer. The protocol is
documented in `engines.child.answering`, which such a process may use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from tidewheel.engines.child import answering
from tidewheel.engines.serving.base import Completion, Engine, EngineLost, EngineUse, Prefix, RunningEngine, Weights
from tidewheel.errors import ConfigError, RolloutError
from tidewheel.parts import name_of
from tidewheel.private_folders import hold, remove_abandoned

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 0.5
HEALTH_SECONDS = 10.0
LOG_CHARACTERS = 1500
"""Of what the process has printed, its end, for messages."""
KEPT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
"""Variables of this environment that would lead the other one's Python astray."""


class ProcessEngine(Engine):
    """Base of engines in a process of their own, which may have another environment."""

    PROGRAM: ClassVar[Path]
    """Python file that the environment's Python runs, with the number of the socket's descriptor."""
    PYTHON: ClassVar[str]
    """Environment variable that names the environment's Python where `python` is not set."""
    INSTALL: ClassVar[str]
    """How to make the environment, for messages."""
    UNDECISIVE: ClassVar[tuple[str, ...]] = ("python", "start_seconds", "silence_seconds")

    python: str = ""
    """Path of the Python of the engine's environment on the generators' nodes."""
    start_seconds: float = Field(default=900.0, gt=0, allow_inf_nan=False)
    """The process is ended if it takes longer to start, or to load a version."""
    silence_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """The process is ended if it samples and gives no sign of life for this time; its group is sampled again."""

    def load_settings(self, use: EngineUse) -> dict[str, object]:
        """Return what `load` sends with the first version, as JSON values."""
        raise NotImplementedError

    def variables(self, use: EngineUse) -> dict[str, str]:
        """Return environment variables of the process."""
        return {}

    def open(self, use: EngineUse) -> RunningEngine:
        """Return the engine; its process starts with the first version.

        Raises:
            ConfigError: there is no such Python.
        """
        name = name_of(type(self))
        python = self.python or os.environ.get(self.PYTHON, "")
        if not python:
            raise ConfigError(f"the Python of the environment of {name} is not known", where="rollouts.engine.python",
                              fix=f"{self.INSTALL}, and set rollouts.engine.python to its Python on the generators' "
                                  f"nodes, or {self.PYTHON} there")
        if shutil.which(python) is None:
            raise ConfigError(f"there is no program {python} on this node", where="rollouts.engine.python",
                              fix=self.INSTALL)
        variables = {**{key: value for key, value in os.environ.items() if key not in KEPT_OUT}, **self.variables(use)}
        limits = Limits(self.start_seconds, self.silence_seconds)
        return ProcessRunning([python, str(self.PROGRAM)], variables, self.load_settings(use), use, limits, name,
                              self.INSTALL)


@dataclass(frozen=True)
class Limits:
    """Seconds after which a process that is silent hangs: while it starts or loads, and while it samples."""

    start: float
    silence: float


class ProcessRunning(RunningEngine):
    """An engine's process, which `load` starts.

    Args:
        command: starts it; the descriptor's number follows.
        variables: its environment.
        settings: see `ProcessEngine.load_settings`.
        use: what the engine is for.
        limits: of silence.
        name: of the engine, for messages.
        install: how to make the environment, for messages.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], settings: dict[str, Any], use: EngineUse,
                 limits: Limits, name: str, install: str) -> None:
        self._command, self._variables, self._settings, self._use = list(command), variables, settings, use
        self._limits, self._name, self._install = limits, name, install
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._folder: Path | None = None  # of the process: its log, and weights while it loads them
        self._held = -1
        self._received = b""
        self._requests = self._versions = 0
        self._weights, self._about = "", name

    def about(self) -> str:
        """See `RunningEngine`."""
        return self._about

    def load(self, weights: Weights) -> None:
        """See `RunningEngine`."""
        starts = self._process is None
        if starts:
            self._start()
        assert self._folder is not None
        folder = self._folder / f"version-{self._versions}"
        self._versions += 1
        self._write(folder, weights)
        files = {path.name: answering.sha256(path) for path in sorted(folder.iterdir())}
        try:
            answer = self._ask({"op": "load", "folder": str(folder), "files": files, "weights": weights.digest,
                                "settings": self._settings}, self._limits.start, starts=starts)
        finally:
            for path in folder.glob("*.safetensors"):
                path.unlink()
        if not starts:  # what was there for the version before
            for before in self._folder.glob("version-*"):
                if before != folder:
                    shutil.rmtree(before, ignore_errors=True)
        self._weights, self._about = weights.digest, str(answer.get("about", self._name))

    def _write(self, folder: Path, weights: Weights) -> None:
        """Write the weights in Hugging Face's format."""
        import torch

        from tidewheel.models import huggingface
        from tidewheel.storage import store

        use = self._use
        dtype = torch.bfloat16 if use.decoding.precision == "bf16" else torch.float32
        huggingface.write(store(folder), use.model, use.vocabulary_size,
                          lambda names: {name: weights.tensors[name] for name in names}, dtype=dtype,
                          eos=sorted(use.decoding.stop))

    def complete(self, prefixes: Sequence[Prefix]) -> Sequence[Completion]:
        """See `RunningEngine`."""
        asked = [{"tokens": list(prefix.tokens), "most": prefix.most, "seed": prefix.seed} for prefix in prefixes]
        answer = self._ask({"op": "complete", "weights": self._weights, "prefixes": asked}, self._limits.silence)
        if answer.get("weights") != self._weights:
            raise self._lost("it sampled with other weights")
        return [Completion(one["tokens"], one["log_probabilities"]) for one in answer["completions"]]

    def health(self) -> None:
        """See `RunningEngine`."""
        if self._process is not None and self._weights:
            self._ask({"op": "health"}, HEALTH_SECONDS)

    def close(self) -> None:
        """See `RunningEngine`."""
        self._end()

    def _start(self) -> None:
        parent = SHARED_MEMORY if self._fits_shared_memory() else Path(tempfile.gettempdir())
        remove_abandoned(parent)
        self._folder = Path(tempfile.mkdtemp(prefix="tidewheel-engine-", dir=parent))
        self._held = hold(self._folder)
        ours, theirs = socket.socketpair()
        with theirs, (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())], env=dict(self._variables), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, pass_fds=(theirs.fileno(),), start_new_session=True, cwd=self._folder)
        logger.info("the process of %s is %d", self._name, self._process.pid)
        self._connection, self._received = ours, b""
        ours.settimeout(POLL_SECONDS)

    def _fits_shared_memory(self) -> bool:
        import math

        from tidewheel.models import huggingface

        if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
            return False
        # fp32 and some room
        shapes = huggingface.weight_shapes(self._use.model, self._use.vocabulary_size).values()
        return shutil.disk_usage(SHARED_MEMORY).free > 5 * sum(math.prod(shape) for shape in shapes)

    def _ask(self, request: dict[str, Any], seconds: float, *, starts: bool = False) -> dict[str, Any]:
        """Return the answer to a request.

        Args:
            request: without its id.
            seconds: longest silence.
            starts: whether the process has just been started, so that an error is not one of its state.

        Raises:
            EngineLost: the process has ended, is silent, or failed.
            ConfigError: the engine is not installed, or does not serve this model.
            RolloutError: it cannot start.
        """
        self._requests += 1
        if self._connection is None:
            raise EngineLost(f"the process of {self._name} has ended")
        try:
            self._send(self._connection, json.dumps({"id": self._requests, **request}).encode() + b"\n", seconds)
            answer = self._answer(self._connection, seconds)
        except (OSError, ValueError, KeyError) as error:
            raise self._lost(f"{type(error).__name__}: {error}") from error
        if "error" not in answer:
            ok: dict[str, Any] = answer["ok"]
            return ok
        reason, detail = str(answer["error"]["reason"]), str(answer["error"]["detail"])
        if reason == answering.MISSING:
            self._end()
            raise ConfigError(f"the environment of {self._name} is not complete: {detail}", where=self._command[0],
                              fix=self._install)
        if reason == answering.UNSUPPORTED:
            self._end()
            raise ConfigError(f"{self._name} cannot serve this model: {detail}", where="rollouts.engine",
                              fix="sample with the native engine (leave rollouts.engine out), or train another model")
        lost = self._lost(f"{reason}: {detail}")
        if starts and reason == answering.FAILED:
            raise RolloutError(f"{self._name} cannot start: {lost}", where="rollouts.engine",
                               fix="correct what the last lines name; the run continues where it stopped") from lost
        raise lost

    def _send(self, connection: socket.socket, data: bytes, seconds: float) -> None:
        view, until = memoryview(data), time.monotonic() + seconds
        while view:
            try:
                view = view[connection.send(view):]
            except TimeoutError:
                if time.monotonic() > until:
                    raise

    def _answer(self, connection: socket.socket, seconds: float) -> dict[str, Any]:
        """Return the next message that is no beat."""
        until = time.monotonic() + seconds
        while True:
            line, end, rest = self._received.partition(b"\n")
            if end:
                self._received = rest
                message: dict[str, Any] = json.loads(line)
                if message["id"] != self._requests:
                    raise ValueError(f"an answer to request {message['id']}, not {self._requests}")
                if "beat" not in message:
                    return message
                until = time.monotonic() + seconds
                continue
            with contextlib.suppress(TimeoutError):
                data = connection.recv(1 << 20)
                if not data:
                    raise ConnectionError("its socket is closed")
                self._received += data
                continue
            if time.monotonic() > until:
                raise TimeoutError(f"no sign of life for {seconds:g} s")

    def _lost(self, reason: str) -> EngineLost:
        """End the process, and return the error that says so."""
        printed = ""
        if self._folder is not None:
            printed = (self._folder / "log").read_bytes().decode(errors="replace")[-LOG_CHARACTERS:].strip()
        status = self._end()
        ended = "" if status is None else f", {_ending(status)}"
        return EngineLost(f"the process of {self._name} is lost: {reason}{ended}"
                          + (f"; it printed: {printed}" if printed else ""))

    def _end(self) -> int | None:
        """End the process and what it has started; return its exit status if it had ended by itself."""
        process, self._process, self._weights = self._process, None, ""
        status = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL_SECONDS if self._connection is not None else 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._held)
            self._folder = None
        return status


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
