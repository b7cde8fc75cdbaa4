"""A finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """A finding. `fix` is empty if there is nothing to fix."""

    name: str
    status: Literal["ok", "warning", "failure"]
    detail: str
    fix: str = ""


def size(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
