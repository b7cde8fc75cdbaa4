"""Row-local filters: judged on one document at a time, fused into reading when they lead the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.config import Config
from tidewheel.data import quality
from tidewheel.data.stages import histograms

MODULES = ("tidewheel.data.quality", "tidewheel.data.kernels", "tidewheel.data.unicode_table",
           "tidewheel.data.stages.filters", "tidewheel.data.stages.histograms")


def settings_of(kind: str, values: dict[str, Any]) -> Config:
    """The settings of a filter from its JSON form."""
    return {"gopher_quality": quality.GopherQuality}[kind].model_validate(values)


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
        if kind != "gopher_quality" or not isinstance(settings, quality.GopherQuality):
            raise ValueError(f"no such filter: {kind}")
        verdict, statistics = quality.gopher_quality(texts, settings)
        reasons = np.where(reasons == "", np.array(verdict, dtype=object), reasons)
        limits = settings.limits()
        for name, values in statistics.items():
            found[name] = histograms.histogram(name, values, limits[name])
    return reasons, found
