"""The report's section about decontamination: items of each benchmark, the matched text, and the second search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidewheel.printable import printable
from tidewheel.report.page import Html, badge, details, join, percent, shorten, table, tag

NOTE = ("Evaluation items found in documents, before anything was removed. A document counts once for each benchmark, "
        "under the item that matches it best.")
_ACTIONS = {"drop": "dropped", "cut": "cut around the match", "annotate": "reported, and not changed"}
_MATCH_CHARACTERS = 240


def section(contamination: Mapping[str, Any]) -> list[Html]:
    """Return the blocks of the section from `contamination` of summary.json; [] if the recipe has no such step."""
    if not contamination:
        return []
    documents, num_read = contamination["documents"], contamination["documents_in"]
    done = _ACTIONS.get(contamination["action"], contamination["action"])
    sentence = (f"{documents:,} of {num_read:,} documents ({percent(documents, num_read, 2)}) hold evaluation items; "
                f"they are {done}.")
    blocks = [tag("p", sentence, " ", _packed(contamination.get("packed"))), _benchmarks(contamination["benchmarks"])]
    if contamination["top"]:
        blocks.append(details("Items found in most documents, with the document's own words",
                              _items(contamination["top"]), open_=True))
    packed = contamination.get("packed") or {}
    if packed.get("matches"):
        blocks.append(details("Found in the packed rows", _packed_items(packed["matches"]), open_=True))
    return blocks


def _packed(packed: Mapping[str, Any] | None) -> Html | None:
    """Return the result of the search through the packed rows."""
    if packed is None:
        return None
    clean = not packed["found"]
    text = f"packed rows searched again: {packed['found']:,} of {packed['segments']:,} segments"
    return badge(text, "good" if clean else "bad")


def _benchmarks(benchmarks: Mapping[str, Mapping[str, int]]) -> Html:
    rows = [(name, f"{entry['items']:,}", f"{entry['items_found']:,}", percent(entry["items_found"], entry["items"], 2),
             f"{entry['documents']:,}")
            for name, entry in sorted(benchmarks.items(), key=lambda pair: (-pair[1]["documents"], pair[0]))]
    return table(("benchmark", "items", "items found", "share", "documents"), rows, numeric=(1, 2, 3, 4))


def _items(top: list[Mapping[str, Any]]) -> Html:
    rows = [(join([entry["benchmark"], " ", tag("code", entry["item"])]), f"{entry['documents']:,}",
             f"{entry['score']:.3f}", _matched(entry)) for entry in top]
    return table(("item", "documents", "best score", "matched text"), rows, numeric=(1, 2))


def _packed_items(matches: list[Mapping[str, Any]]) -> Html:
    rows = [(join([entry["benchmark"], " ", tag("code", entry["item"])]), tag("code", entry["id"]),
             f"{entry['score']:.3f}", _matched(entry)) for entry in matches]
    return table(("item", "document", "score", "matched text"), rows, numeric=(2,))


def _matched(entry: Mapping[str, Any]) -> str:
    return shorten(printable(" ".join(str(entry["match"]).split())), _MATCH_CHARACTERS)
