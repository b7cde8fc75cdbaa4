"""Learning rate as a function of how much of the run is done."""

from __future__ import annotations

import math

from tidewheel.train.optim.config import ScheduleConfig


def learning_rate(done: int, total: int, peak: float, config: ScheduleConfig) -> float:
    """Learning rate of the step that ends at `done`.

    Args:
        done: steps or tokens (`config.unit`), those of this step included; 1 <= done <= total.
        total: of the whole run.
        peak: reached at the end of the warm-up, which is linear and takes at most half of the run.

    Returns:
        peak x a factor that falls from 1 to `final_fraction` along the form of the decay.
    """
    warmup = min(config.warmup, total // 2)
    if done <= warmup:
        return peak * done / warmup
    return peak * (config.final_fraction + (1.0 - config.final_fraction) * _left(done, total, warmup, config))


def _left(done: int, total: int, warmup: int, config: ScheduleConfig) -> float:
    """1 after the warm-up, 0 at the end of the run (constant: always 1)."""
    start = warmup if config.kind != "wsd" else max(warmup, total - config.decay_fraction * total)
    share = max(0.0, done - start) / (total - start)
    if config.kind == "constant":
        return 1.0
    if config.kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * share))
    if config.kind == "wsd" and config.decay_form == "1-sqrt":
        return 1.0 - math.sqrt(share)
    return 1.0 - share
