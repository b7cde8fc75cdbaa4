"""Turn steps into lines of figures: speeds and memory of rank 0."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from tidewheel.train.metrics.gpu_peaks import peak_of_device
from tidewheel.train.metrics.measure import memory


@dataclass
class Meter:
    """Speeds and memory of rank 0, over the steps since the last line.

    MFU = tokens/s x FLOPs per token / (peak of one device x devices), with `Model.flops_per_token` (6 N + 12
    layers x heads x head width x L: full attention, without recomputation) and the dense bf16 peak of
    `gpu_peaks`. A device with an unknown peak and a model with unknown FLOPs have no MFU.
    """

    every_steps: int
    last_step: int
    """Last step of the run, which always has a line."""
    world_size: int
    device: torch.device
    flops_per_token: float
    peak: float | None = None
    """FLOP/s of one device; by default looked up by its name."""
    _sums: dict[str, float] = field(default_factory=dict)
    _steps: int = 0

    def __post_init__(self) -> None:
        if self.peak is None:
            self.peak = peak_of_device(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def is_due(self, step: int) -> bool:
        """Return whether `step`, counted from 1, has a line."""
        return step % self.every_steps == 0 or step == self.last_step

    def step(self, step: int, *, tokens: int, seconds: float, waited: float,
             communication: float = 0.0) -> dict[str, Any] | None:
        """Count a step, and return the figures of a line if one is due.

        Args:
            step: counts from 1.
            tokens: real tokens of the step.
            seconds: duration of the step, with the wait for data.
            waited: seconds of the wait for data.
            communication: seconds of the wait for other workers.

        Returns:
            "step_seconds", "data_wait_seconds" and "communication_seconds" per step, "tokens_per_second",
            "tokens_per_second_per_worker", "mfu" if the peak is known, and the memory as in `measure.memory`.
        """
        for name, value in (("tokens", tokens), ("seconds", seconds), ("waited", waited),
                            ("communication", communication)):
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        if not self.is_due(step):
            return None
        sums, steps = self._sums, self._steps
        self._sums, self._steps = {}, 0
        speed = sums["tokens"] / max(sums["seconds"], 1e-9)
        line: dict[str, Any] = {
            "time": time.time(), "tokens_per_second": speed, "tokens_per_second_per_worker": speed / self.world_size,
            "step_seconds": sums["seconds"] / steps, "data_wait_seconds": sums["waited"] / steps,
            "communication_seconds": sums["communication"] / steps,
            **memory(self.device)}
        if self.peak and self.flops_per_token:
            line["mfu"] = speed * self.flops_per_token / (self.peak * self.world_size)
        return line
