"""Say when too much communication is not hidden behind computation, and what to change. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIMIT = 0.15
"""Share of the time in steps from which waiting for other workers is worth a remark."""
UNEVEN = 1.2
"""A worker whose own time is this many times the median's makes the others wait."""


@dataclass(frozen=True)
class Finding:
    """How much communication is not hidden."""

    share: float
    """Share of the time in steps that count."""
    fix: str
    """What to change; "" below `LIMIT`."""

    @property
    def detail(self) -> str:
        """The finding as text."""
        return f"steps wait for other workers in {self.share:.0%} of their time"


def examine(parts: Mapping[str, float], config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
            ) -> Finding | None:
    """Return how much communication of a run is not hidden; None without a step.

    Args:
        parts: worker seconds by category (`train.time_ledger`).
        config: of the run, as in run.json.
        metrics: lines of metrics.jsonl, the newest last.
    """
    waited = parts.get("communication", 0.0)
    whole = waited + parts.get("productive", 0.0)
    if not whole:
        return None
    share = waited / whole
    return Finding(share, "; ".join(_changes(config, metrics)) if share > LIMIT else "")


def _changes(config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what may help, the most likely first."""
    parallel = config.get("parallel", {})
    data = parallel.get("data", "auto")
    changes: list[str] = []
    own: list[float] = next((line["own_seconds"] for line in reversed(metrics) if line.get("own_seconds")), [])
    if own and max(own) > UNEVEN * statistics.median_low(own):
        changes.append(f"worker {own.index(max(own))} is slower than the others, which wait for it: see "
                       "elastic.slow_worker")
    if parallel.get("tensor", 1) > 1 and not parallel.get("async_tensor"):
        changes.append("overlap tensor parallelism (parallel.async_tensor, NVIDIA GPUs), or lower parallel.tensor")
    if parallel.get("pipeline", 1) > 1:
        changes.append("give a pipeline more micro-batches (a larger batch.global_sequences)")
    if data in ("ddp", "zero1"):
        if not config.get("compression"):
            changes.append("compress gradients (compression, docs/compression.md)")
        if not config.get("reproducible"):  # which sums after the last backward pass
            changes.append("start to send earlier with smaller parallel.bucket_bytes")
    else:
        if data != "zero2":
            changes.append("gather parameters once a step if they fit (parallel.data zero2)")
        changes.append("gather parameters further ahead (parallel.prefetch 2)")
        if parallel.get("reduce") == "micro_batch" or (data == "zero3" and parallel.get("reduce") != "step"):
            changes.append("reduce gradients once a step if they fit (parallel.reduce step)")
    if parallel.get("reduce_dtype", "fp32") == "fp32" and not config.get("reproducible"):
        changes.append("send gradients in 16 bits (parallel.reduce_dtype bf16)")
    return [*changes, "compute more between two sums with a larger batch, or take fewer workers"]
