"""One finding of the examination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One finding; `mend` is empty when there is nothing to mend."""

    name: str
    status: Literal["ok", "warning", "failure"]
    detail: str
    mend: str = ""


def size(number: float) -> str:
    """Bytes for people."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
