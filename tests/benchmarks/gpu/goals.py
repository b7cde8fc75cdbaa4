"""The goals, and which of them the rows meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Records = Mapping[str, Mapping[str, Any]]
"""Valid records by the name of their row; the last try of each."""


@dataclass(frozen=True)
class Goal:
    """A goal of the benchmark."""

    column: str
    """Column of the table."""
    row: str
    """Row whose cell of that column has the verdict."""
    text: str
    limit: float
    at_least: bool
    value: Callable[[Records], float | None]
    percent: bool = True
    device: str = ""
    """The goal is for a GPU whose name contains this."""

    def verdict(self, records: Records, device: str) -> tuple[float | None, str]:
        """Return the value, None if it was not measured, and "met", "not met" or "not measured".

        Args:
            records: of the rows.
            device: product of the GPU.
        """
        value = self.value(records)
        if value is None or device in ("", "CPU"):
            return None, "not measured"
        if self.device not in device:
            return value, f"not measured on an {self.device}"
        return value, "met" if (value >= self.limit if self.at_least else value < self.limit) else "not met"

    def shown(self, value: float | None) -> str:
        """Return the value as the table shows it."""
        if value is None:
            return ""
        return f"{100 * value:.1f} %" if self.percent else f"{value:.2f}"


def _figure(row: str, name: str) -> Callable[[Records], float | None]:
    return lambda records: records.get(row, {}).get(name)


def _ratio(row: str, other: str) -> Callable[[Records], float | None]:
    def ratio(records: Records) -> float | None:
        values = [records.get(name, {}).get("tokens_per_second") for name in (row, other)]
        return values[0] / values[1] if values[0] and values[1] else None

    return ratio


TITAN, MFU, FP8, STALL, REPRODUCIBLE = "x torchtitan", "MFU", "x bf16", "stall", "slower"
GOALS: Sequence[Goal] = (
    Goal(TITAN, "ours, documents", "tokens/s of torchtitan in bf16 on the same documents, at least 1.15 times", 1.15,
         True, _ratio("ours, documents", "torchtitan, documents"), percent=False),
    Goal(MFU, "ours, whole rows", "MFU on whole rows, at least 60 % on an H200", 0.60, True,
         _figure("ours, whole rows", "mfu"), device="H200"),
    Goal(MFU, "ours, documents", "MFU on packed documents, at least 65 % on an H200", 0.65, True,
         _figure("ours, documents", "mfu"), device="H200"),
    Goal(FP8, "ours, 8b width, fp8", "tokens/s of our bf16 at 8b width, with fp8 at least 1.2 times", 1.2, True,
         _ratio("ours, 8b width, fp8", "ours, 8b width, bf16"), percent=False),
    Goal(STALL, "memory tier", "stall of a copy in the memory tier, under 2 % of a step", 0.02, False,
         _figure("memory tier", "stall_share")),
    Goal(STALL, "asynchronous save", "stall of an asynchronous save, under 2 % of a step", 0.02, False,
         _figure("asynchronous save", "stall_share")),
    Goal(REPRODUCIBLE, "reproducible, two ranks", "reproducible mode on NCCL, under 5 % slower", 0.05, False,
         _figure("reproducible, two ranks", "slower")),
)
INFORMATION: Sequence[Goal] = (
    Goal(TITAN, "ours, whole rows", "", 0, True, _ratio("ours, whole rows", "torchtitan, whole rows"), percent=False),
    Goal(TITAN, "bare loop, documents", "", 0, True, _ratio("bare loop, documents", "torchtitan, documents"),
         percent=False),
    Goal(TITAN, "bare loop, whole rows", "", 0, True, _ratio("bare loop, whole rows", "torchtitan, whole rows"),
         percent=False),
    Goal(FP8, "ours, 8b width, fp8 tensorwise", "", 0, True,
         _ratio("ours, 8b width, fp8 tensorwise", "ours, 8b width, bf16"), percent=False),
    Goal(REPRODUCIBLE, "reproducible, 4 micro-batches", "", 0, False, lambda records: _slower(records)),
)
"""Figures that stand in the columns of goals but are none."""


def _slower(records: Records) -> float | None:
    ratio = _ratio("ours, 4 micro-batches", "reproducible, 4 micro-batches")(records)
    return None if ratio is None else ratio - 1


def valid(records: Sequence[Mapping[str, Any]]) -> Records:
    """Return the records that count: of rows that ended well and whose loss fell."""
    return {record["row"]: record for record in records if record["status"] == "ok" and record.get("valid", True)}
