"""Each step as a line of figures, handed to the sinks; and what only a look at all ranks can tell."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from tidewheel.train.metrics.measure import memory, peak_flops


@dataclass
class Meter:
    """Speeds and memory of rank 0, over the steps since the last line.

    MFU = tokens/s x FLOPs per token / (peak of one device x devices), with `Model.flops_per_token` (6 N + 12
    layers x heads x head width x L, attention counted as full, recomputation not counted) and the dense bf16 peak of
    `measure.PEAK_FLOPS`; left out where the peak is not known.
    """

    every_steps: int
    last_step: int
    """Of the run: it has a line whatever `every_steps` is."""
    world_size: int
    device: torch.device
    flops_per_token: float
    peak: float | None = None
    """FLOP/s of one device; found by its name."""
    _sums: dict[str, float] = field(default_factory=dict)
    _steps: int = 0

    def __post_init__(self) -> None:
        if self.peak is None:
            self.peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def step(self, step: int, *, tokens: int, seconds: float, waited: float) -> dict[str, Any] | None:
        """One step is done; the line's figures when one is due.

        Args:
            tokens: real tokens of the step.
            seconds: it took, with the wait for data.
            waited: for data.

        Returns:
            "step_seconds" and "data_wait_seconds" per step, "tokens_per_second", "tokens_per_second_per_worker", "mfu"
            where it is known, and the memory as in `measure.memory`.
        """
        for name, value in (("tokens", tokens), ("seconds", seconds), ("waited", waited)):
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        if step % self.every_steps and step != self.last_step:
            return None
        sums, steps = self._sums, self._steps
        self._sums, self._steps = {}, 0
        speed = sums["tokens"] / max(sums["seconds"], 1e-9)
        line: dict[str, Any] = {
            "time": time.time(), "tokens_per_second": speed, "tokens_per_second_per_worker": speed / self.world_size,
            "step_seconds": sums["seconds"] / steps, "data_wait_seconds": sums["waited"] / steps,
            **memory(self.device)}
        if self.peak:
            line["mfu"] = speed * self.flops_per_token / (self.peak * self.world_size)
        return line
