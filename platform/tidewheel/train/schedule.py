"""Learning rate as a function of the step."""

from __future__ import annotations

import math

from tidewheel.train.config import ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, config: ScheduleConfig) -> float:
    """Learning rate of step 1 <= `step` <= `steps`: rises linearly to `peak`, then decays to final_fraction x peak."""
    warmup = min(config.warmup_steps, steps // 2)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    falling = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.kind]
    return peak * (config.final_fraction + (1.0 - config.final_fraction) * falling)
