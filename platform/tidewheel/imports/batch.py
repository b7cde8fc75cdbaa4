"""The global batch and the learning rate's schedule from the settings of tools that count per GPU."""

from __future__ import annotations

import math
from typing import Any

from tidewheel.errors import ConfigError


def batch(*, global_size: int | None = None, micro: int | None = None, accumulation: int | None = None,
          gpus: int | None = None, where: str) -> dict[str, Any]:
    """Return our batch, by dotted name; empty if nothing is known of it.

    global = micro x accumulation x GPUs. Each GPU becomes a virtual rank, so the run may use any number of workers
    that divides the number of GPUs, with the same result.

    Args:
        global_size: sequences of a step; None: not given.
        micro: sequences of a pass on one GPU.
        accumulation: passes of a step on one GPU.
        gpus: data-parallel GPUs.
        where: name of the tool, for messages.

    Raises:
        ConfigError: the numbers contradict each other.
    """
    if global_size is None and micro is None:
        return {}
    if global_size is not None and micro is None:
        share = global_size / ((gpus or 1) * (accumulation or 1))
        micro = max(1, int(share))
    micro = micro or 1
    if global_size is None:
        global_size = micro * (accumulation or 1) * (gpus or 1)
    ranks = gpus or max(1, global_size // (micro * accumulation)) if accumulation else gpus or 1
    if global_size % (micro * ranks):
        raise ConfigError(f"{global_size} sequences of a step are not a multiple of {micro} x {ranks} GPUs",
                          where=where, fix="give the number of data-parallel GPUs of the run with --gpus, or --set "
                              "batch.global_sequences, batch.micro_sequences and batch.virtual_ranks")
    if accumulation and gpus and micro * accumulation * gpus != global_size:
        raise ConfigError(f"{global_size} sequences of a step are not {micro} x {accumulation} x {gpus} GPUs",
                          where=where, fix="correct the batch, or give the number of data-parallel GPUs with --gpus")
    return {"batch.global_sequences": global_size, "batch.micro_sequences": micro, "batch.virtual_ranks": ranks}


def warmup(value: float, steps: int | None) -> int | None:
    """Return steps of warm-up from a number of steps, or from a share of the run below 1."""
    if value >= 1 or value == 0:
        return int(value)
    return math.ceil(value * steps) if steps else None
