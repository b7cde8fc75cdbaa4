"""Histograms with fixed edges, so that the histograms of units add up and do not depend on their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tidewheel.versions import Version

VERSION = Version("histograms")
_WORDS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000]
_NGRAMS = [*(edge / 100 for edge in range(31)), 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]  # every default threshold is an edge
_COUNTS = [0, 1, 2, 3, 5, 10, 20, 50, 100, 1_000]
_EDGES: dict[str, list[float]] = {
    "words": [float(edge) for edge in _WORDS],
    "mean_word_length": [edge / 2 for edge in range(41)],
    "stop_words": [float(edge) for edge in range(10)],
    "url_soft_words": [float(edge) for edge in range(11)],
    "listed_words": [float(edge) for edge in _WORDS],
    "fineweb_terminal_lines": [edge / 25 for edge in range(26)],
    "fineweb_duplicate_line_characters": [0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1],
    "refinedweb_removed_words": [0, 0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.2, 0.5, 1],
    **{name: [float(edge) for edge in _COUNTS] for name in ("c4_sentences", "c4_removed_lines",
                                                            "refinedweb_removed_lines", "refinedweb_cut_phrases",
                                                            "pii_emails", "pii_addresses")},
    **{f"top_{n}_gram": _NGRAMS for n in (2, 3, 4)},
    **{f"duplicate_{n}_grams": _NGRAMS for n in (5, 6, 7, 8, 9, 10)},
}
_SHARES = [edge / 20 for edge in range(21)]

Histogram = dict[str, Any]


def histogram(name: str, values: np.ndarray, limits: tuple[float | None, float | None] = (None, None)) -> Histogram:
    """Return {"edges", "counts", "threshold", "limits"} of a statistic; values beyond the edges go to the outer bins.

    Args:
        name: name of the statistic. One without its own edges is taken to be a share from 0 to 1.
        values: float [n].
        limits: smallest and largest value that is kept; the threshold is the first one that is not None.
    """
    edges = _EDGES.get(name, _SHARES)
    clipped = np.clip(np.asarray(values, np.float64), edges[0], edges[-1])
    counts, _ = np.histogram(clipped, edges)
    threshold = limits[0] if limits[0] is not None else limits[1]
    return {"edges": edges, "counts": counts.tolist(), "threshold": threshold, "limits": list(limits)}


def merge(parts: Iterable[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    """Return the sum of histograms, by name."""
    total: dict[str, Histogram] = {}
    for part in parts:
        for name, added in part.items():
            if name not in total:
                total[name] = {**added, "counts": list(added["counts"])}
            else:
                counts = total[name]["counts"]
                total[name]["counts"] = [a + b for a, b in zip(counts, added["counts"], strict=True)]
    return dict(sorted(total.items()))
