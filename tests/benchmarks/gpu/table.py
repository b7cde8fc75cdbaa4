"""The table for people, from the records of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.gpu.goals import FP8, GOALS, INFORMATION, MFU, REPRODUCIBLE, STALL, TITAN, valid

GOAL_COLUMNS = (TITAN, FP8, STALL, REPRODUCIBLE)
COLUMNS = ("row", "B x L", "ms (least to most)", "tokens/s", MFU, "peak GiB", "loss", *GOAL_COLUMNS, "remarks")
SHOWN = {"row", "rows", "length", "document", "halved", "status", "reason", "seconds", "ms", "ms_low", "ms_high",
         "tokens_per_second", "mfu", "peak_gib", "loss_first", "loss_last", "valid", "note", "first_step_seconds",
         "stall_share", "stall_ms_all", "slower", "device"}
"""Figures that have a column, or are only in rows.jsonl. The remarks name all others."""
NO_GPU = "shape only, no timing"
REMARK = 200
"""Characters of a figure in the remarks; rows.jsonl has all of it."""


def page(records: Sequence[Mapping[str, Any]], device: str) -> str:
    """Return the results as Markdown.

    Args:
        records: of the rows.
        device: product of the GPU; "CPU" without one.
    """
    cells = [_cells(record, records, device) for record in records]
    rows = [[row[name] for name in COLUMNS] for row in cells]
    torch = next((record["torch"] for record in records if "torch" in record), "unknown")
    parts = [f"{device}, torch {torch}", markdown(COLUMNS, rows)]
    if device == "CPU":
        parts.append(NO_GPU)
    else:
        counted = valid(records)
        goals = [(goal, *goal.verdict(counted, device)) for goal in GOALS]
        parts.append(markdown(("goal", "measured", "verdict"),
                              [[goal.text, goal.shown(value), verdict] for goal, value, verdict in goals]))
    return "\n\n".join(parts) + "\n"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are aligned, so that it can be read as it is."""
    widths = [max(len(name), *(len(row[index]) for row in rows)) if rows else len(name)
              for index, name in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths))} |" for line in lines)


def _cells(record: Mapping[str, Any], records: Sequence[Mapping[str, Any]], device: str) -> dict[str, str]:
    cells = dict.fromkeys(COLUMNS, "")
    halved = " (halved)" if record["halved"] else ""
    cells["row"] = record["row"]
    if "loss_first" in record or "documents_varlen_ms" in record or halved:  # other rows have no batch
        cells["B x L"] = f"{record['rows']} x {record['length']}{halved}"
    if record["status"] != "ok":
        return cells | {"remarks": f"{record['status']}: {_safe(record['reason'])}"}
    timed = device != "CPU"
    if timed and "ms" in record:
        cells["ms (least to most)"] = f"{record['ms']:.1f}" + (
            f" ({record['ms_low']:.1f} to {record['ms_high']:.1f})" if "ms_low" in record else "")
    if timed and "tokens_per_second" in record:
        cells["tokens/s"] = f"{record['tokens_per_second']:,.0f}"
    if timed and record.get("mfu"):
        cells[MFU] = f"{100 * record['mfu']:.1f} %"
    if record.get("peak_gib"):
        cells["peak GiB"] = f"{record['peak_gib']:.1f}"
    if "loss_first" in record:
        cells["loss"] = f"{record['loss_first']:.2f} to {record['loss_last']:.2f}" + (
            "" if record["valid"] else ": IT DID NOT FALL")
    return cells | _goals(record, records, device) | {"remarks": _remarks(record, timed)}


def _goals(record: Mapping[str, Any], records: Sequence[Mapping[str, Any]], device: str) -> dict[str, str]:
    """Return the cells of a row in the columns that have goals."""
    counted, cells = valid(records), dict[str, str]()
    for goal in GOALS:
        if goal.row == record["row"]:
            value, verdict = goal.verdict(counted, device)
            cells[goal.column] = f"{goal.shown(value)}: {verdict}" if value is not None else verdict
    for figure in INFORMATION if device != "CPU" else ():
        if figure.row == record["row"]:
            cells[figure.column] = figure.shown(figure.value(counted))
    return cells


def _remarks(record: Mapping[str, Any], timed: bool) -> str:
    remarks = [_safe(record["note"])] if record.get("note") else []
    if record.get("valid") is False and "loss_first" not in record:
        remarks.append("FAILED")
    for name, value in record.items():
        is_time = isinstance(value, float) and not timed
        if name not in SHOWN and value not in (None, [], "") and not is_time:
            text = f"{value:.3g}" if isinstance(value, float) else _safe(str(value))
            remarks.append(f"{name} {text if len(text) <= REMARK else text[:REMARK] + '...'}")
    return ", ".join(remarks)


def _safe(text: str) -> str:
    return " ".join(str(text).replace("|", "/").split())
