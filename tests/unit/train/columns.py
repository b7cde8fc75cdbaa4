"""Helpers of tests of columns: their files, and a command that is killed while it writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidewheel.storage import LocalStore


def contents(root: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by their paths in it."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def kill_at_write(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the process be killed when it begins to write its file of this number, counted from 1."""
    real, calls = LocalStore.writer, []

    def killed(self: LocalStore, key: str) -> Any:
        calls.append(key)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(self, key)

    monkeypatch.setattr(LocalStore, "writer", killed)
