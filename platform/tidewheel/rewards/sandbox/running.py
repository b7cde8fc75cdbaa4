"""Run a model's code in a process with limits, and see how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidewheel.errors import ConfigError
from tidewheel.rewards.sandbox.child import CANNOT, READY
from tidewheel.rewards.scoring import children

CHILD = Path(__file__).with_name("child.py")
START_SECONDS = 120.0
"""The interpreter may take this long to start, before any of the code runs."""
POLL_SECONDS = 0.02
ENVIRONMENT = {"PATH": "", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
"""Nothing of this process's own environment, which may hold secrets, gets there."""


class SandboxFailed(Exception):
    """The sandbox, not the code, is to blame.

    Args:
        reason: a short name to count by.
        detail: what is special about this run.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Limits:
    """What a process may use.

    Args:
        cpu_seconds: processor time of all its threads.
        wall_seconds: on the clock.
        memory_bytes: of its address space.
        file_bytes: of each file.
        output_bytes: of its results or its output.
        isolate: keep network, files and other processes away from it.
    """

    cpu_seconds: int
    wall_seconds: float
    memory_bytes: int
    file_bytes: int
    output_bytes: int
    isolate: bool = True


@dataclass(frozen=True)
class Ran:
    """How the code ended.

    Args:
        output: its results or its standard output.
        problem: why it ended early, "" if it did not.
    """

    output: str
    problem: str


def run(code: str, limits: Limits, *, calls: Sequence[str] | None = None, text: str = "") -> Ran:
    """Run code in a new process and an empty folder, and end what is left of both.

    Args:
        code: Python.
        limits: of the process.
        calls: expressions whose values are wanted, one line of `child.text_of` for each; None: run the code as a
            program.
        text: a program's standard input.

    Raises:
        SandboxFailed: no fault of the code.
        ConfigError: this machine cannot isolate a process.
    """
    job = {"code": code, "calls": None if calls is None else list(calls), "input": text, "isolate": limits.isolate,
           "cpu_seconds": limits.cpu_seconds, "memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes}
    with tempfile.TemporaryDirectory(prefix="tw-code-", ignore_cleanup_errors=True) as folder:
        try:
            child = subprocess.Popen([sys.executable, "-s", "-S", "-P", "-B", str(CHILD)], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
                                     env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}, start_new_session=True)
        except OSError as error:
            raise SandboxFailed("sandbox", f"no process: {error}") from error
        watch = _Watch(child, limits)
        try:
            with contextlib.suppress(BrokenPipeError):
                assert child.stdin is not None
                child.stdin.write(json.dumps(job).encode())
                child.stdin.close()
            return watch.result()
        finally:
            watch.close()


class _Watch:
    """Watches one process until it ends, or ends it.

    Args:
        child: the process, whose group has its number.
        limits: of the process.
    """

    def __init__(self, child: subprocess.Popen[bytes], limits: Limits) -> None:
        assert child.stdout is not None
        self._child, self._limits, self._pipe = child, limits, child.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._data = bytearray()
        self._open = True
        self._status: int | None = None
        self._processor = 0.0

    def result(self) -> Ran:
        """Return how the code ended; see `run`."""
        self._first_line()
        head, _, rest = bytes(self._data).partition(b"\n")
        line = head.decode(errors="replace")
        if line.startswith(CANNOT):
            raise ConfigError(f"this machine cannot isolate a process: {line.removeprefix(CANNOT)}", where="sandbox",
                              fix="judge on Linux 5.13 or later with Landlock and seccomp, or set sandbox to limits: "
                                  "the code then has limits of time and memory, but reaches files and the network")
        if line != READY:
            raise SandboxFailed("sandbox", f"it ended before the code began, {children.ending(self._status)}")
        self._data = bytearray(rest)
        problem = self._until_it_ends()
        return Ran(self._data.decode(errors="replace"), problem)

    def _first_line(self) -> None:
        until = time.monotonic() + START_SECONDS
        while b"\n" not in self._data and self._open and time.monotonic() < until:
            self._read()
        if b"\n" not in self._data and self._open:
            raise SandboxFailed("sandbox", f"it has not begun after {START_SECONDS:g} s")
        if not self._open:
            self._wait_for_status(time.monotonic() + START_SECONDS)

    def _until_it_ends(self) -> str:
        """Read until the process ends or breaks a limit; return which."""
        began, waited = time.monotonic(), self._waited()
        while self._status is None:
            self._read()
            if len(self._data) > self._limits.output_bytes:
                return "output"
            seconds = time.monotonic() - began
            if seconds > self._limits.wall_seconds:
                if self._waited() - waited > seconds / 2:
                    raise SandboxFailed("starved", f"it had no processor for most of {seconds:.1f} s")
                return "time"
            self._reap()
        while self._open and self._read() and len(self._data) <= self._limits.output_bytes:
            pass
        if len(self._data) > self._limits.output_bytes:
            return "output"
        if self._status == -signal.SIGXCPU:
            return "time"
        if self._status == -signal.SIGKILL:
            if self._processor < self._limits.cpu_seconds:
                raise SandboxFailed("killed", "something outside ended it, short memory of the machine perhaps")
            return "time"
        return "" if self._status == 0 else f"it ended, {children.ending(self._status)}"

    def _read(self) -> bool:
        """Read what is there, or wait a moment; return whether there was something."""
        if not self._open:
            time.sleep(POLL_SECONDS)
            return False
        ready, _, _ = select.select([self._pipe], [], [], POLL_SECONDS)
        if not ready:
            return False
        data = os.read(self._pipe, 1 << 16)
        self._open = bool(data)
        self._data += data
        return self._open

    def _reap(self) -> None:
        pid, status, usage = os.wait4(self._child.pid, os.WNOHANG)
        if pid:
            self._status = self._child.returncode = os.waitstatus_to_exitcode(status)
            self._processor = usage.ru_utime + usage.ru_stime

    def _wait_for_status(self, until: float) -> None:
        while self._status is None and time.monotonic() < until:
            self._reap()
            time.sleep(POLL_SECONDS)

    def _waited(self) -> float:
        """Return for how many seconds the threads of the process were ready to run and had no processor."""
        nanoseconds = 0
        for path in Path(f"/proc/{self._child.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                nanoseconds += int(path.read_text().split()[1])
        return nanoseconds / 1e9

    def close(self) -> None:
        """End the process and its group."""
        children.kill(self._child)
        if self._status is None:
            self._child.wait()
        children.close_pipes(self._child)
