"""Row-local filters: judged on one document at a time, fused into reading when they lead the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.config import Config
from tidewheel.data import fineweb, quality, repetition
from tidewheel.data.stages import histograms

MODULES = ("tidewheel.data.quality", "tidewheel.data.repetition", "tidewheel.data.fineweb", "tidewheel.data.kernels",
           "tidewheel.data.line_kernels", "tidewheel.data.text", "tidewheel.data.unicode_table",
           "tidewheel.data.stages.filters", "tidewheel.data.stages.histograms")

_FILTERS: dict[str, tuple[type[Any], Callable[..., tuple[list[str], dict[str, np.ndarray]]]]] = {
    "gopher_repetition": (repetition.GopherRepetition, repetition.gopher_repetition),
    "gopher_quality": (quality.GopherQuality, quality.gopher_quality),
    "fineweb": (fineweb.FineWeb, fineweb.fineweb),
}


def settings_of(kind: str, values: dict[str, Any]) -> Config:
    """The settings of a filter from its JSON form."""
    settings: Config = _FILTERS[kind][0].model_validate(values)
    return settings


def judge(rules: Sequence[tuple[str, Config]], texts: pa.Array | pa.ChunkedArray
          ) -> tuple[np.ndarray, dict[str, histograms.Histogram]]:
    """Apply filters, one after the other.

    Returns:
        The reason per document, object array of strings ("" = keep; the first filter that drops it names it), and
        the histograms of every statistic over all documents.
    """
    reasons = np.full(len(texts), "", dtype=object)
    found: dict[str, histograms.Histogram] = {}
    for kind, settings in rules:
        settings_class, apply = _FILTERS.get(kind, (None, None))
        if settings_class is None or apply is None or not isinstance(settings, settings_class):
            raise ValueError(f"no such filter: {kind}; there are {', '.join(_FILTERS)}")
        verdict, statistics = apply(texts, settings)
        reasons = np.where(reasons == "", np.array(verdict, dtype=object), reasons)
        limits = settings.limits()
        for name, values in statistics.items():
            found[name] = histograms.histogram(name, values, limits[name])
    return reasons, found
