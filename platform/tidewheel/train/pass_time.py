"""How long a rank's own forward and backward passes take, without the collectives between steps."""

from __future__ import annotations

import time
from typing import Any

import torch


class PassTime:
    """Seconds a micro-batch since the last reading: of the clock on a CPU, between two events on a GPU.

    It measures nothing until it is opened, because events cost the host some microseconds a step.
    """

    def __init__(self) -> None:
        self._opened, self._on_gpu = False, False
        self._began = 0.0
        self._seconds, self._micro_batches = 0.0, 0
        self._events: list[tuple[Any, Any]] = []

    def open(self, device: torch.device) -> None:
        """Measure from the next step on.

        Args:
            device: that computes.
        """
        self._opened, self._on_gpu = True, device.type == "cuda"

    def begin(self) -> None:
        """Begin the passes of a step."""
        if self._on_gpu:
            self._events.append((_event(), torch.cuda.Event(enable_timing=True)))
        self._began = time.perf_counter()

    def end(self, micro_batches: int) -> None:
        """End the passes of a step.

        Args:
            micro_batches: whose passes they were.
        """
        if not self._opened:
            return
        self._micro_batches += micro_batches
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def read(self) -> float:
        """Return the seconds a micro-batch since the last reading, and wait for the device's last pass; 0 if none."""
        for began, ended in self._events:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1e3
        seconds = self._seconds / max(1, self._micro_batches)
        self._seconds, self._micro_batches = 0.0, 0
        self._events.clear()
        return seconds


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
