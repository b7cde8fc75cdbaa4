"""End child processes that run code which may do anything, and say how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def kill(child: subprocess.Popen[bytes]) -> None:
    """End a child that leads a process group, and what it has started, where it could."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def close_pipes(child: subprocess.Popen[bytes]) -> None:
    """Close this side of a child's standard input and output."""
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()


def ending(status: int | None) -> str:
    """Return an exit status in words; None: there is none yet."""
    if status is None:
        return "still running"
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
