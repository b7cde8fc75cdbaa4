"""Colours that mean the same wherever they are: a reason has one in every chart, table and list of a page, and nearly
always the same one on every other page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

PALETTE = tuple(f"var(--d{number})" for number in range(16))
"""The page's colours for distinct items; the last one is for all other items."""


def of_reasons(stages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a colour for each reason to drop a document, the most frequent first.

    A reason's name chooses its colour; if a more frequent reason has that one, the next that is free. Reasons beyond
    the palette share its last colour.

    Args:
        stages: as in summary.json.
    """
    totals: dict[str, int] = {}
    for stage in stages:
        for reason, dropped in stage.get("dropped", {}).items():
            totals[reason] = totals.get(reason, 0) + dropped
    ordered = sorted((reason for reason in totals if totals[reason]), key=lambda reason: (-totals[reason], reason))
    colours: dict[str, str] = {}
    free = set(range(len(PALETTE) - 1))
    for reason in ordered:
        wish = crc32(reason.encode()) % (len(PALETTE) - 1)
        nearest = min(free, key=lambda slot: (slot - wish) % (len(PALETTE) - 1), default=len(PALETTE) - 1)
        free.discard(nearest)
        colours[reason] = PALETTE[nearest]
    return colours


def of_stages(stages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a colour for each stage that drops documents: that of its reason if it has one alone, else one that no
    reason has."""
    reasons = of_reasons(stages)
    free = [colour for colour in PALETTE[:-1] if colour not in reasons.values()]
    colours = {}
    for stage in stages:
        dropped = [reason for reason, count in stage.get("dropped", {}).items() if count]
        if len(dropped) == 1:
            colours[stage["name"]] = reasons[dropped[0]]
        elif dropped:
            colours[stage["name"]] = free.pop(0) if free else PALETTE[-1]
    return colours
