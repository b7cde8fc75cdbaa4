"""A rank's own time on a GPU: the device's time in the blocks, measured by events around their forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn


class OwnTime(Protocol):
    """Measures the time that a rank works, without the time that it waits for other ranks."""

    def restart(self) -> None:
        """Leave out everything before this call."""

    def end_step(self) -> None:
        """Note the end of a step."""

    def seconds_per_step(self, steps: int) -> float | None:
        """Return the rank's own seconds per step; None if they are not known yet. Called once per reading.

        Args:
            steps: steps since the last call.
        """

    def close(self) -> None:
        """Stop measuring."""


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None:
        """Note the time at which the device gets here."""

    def query(self) -> bool:
        """Return whether the device has got here. Does not wait."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to `end`."""


class DeviceTime:
    """Time of the device between the beginning and the end of each block's forward pass, in one step per reading.

    FSDP2 gathers a block's weights in a hook before the first event, and nothing in a block waits for another
    data-parallel rank. With tensor or context parallelism the collectives in a block count too, so all ranks of such a
    group have the time of its slowest.

    The host never waits for the device: a reading takes the events of the reading before, if they have completed.

    Args:
        blocks: modules whose forward passes are measured, after parallelism has been applied.
        event: creates an event on the current stream.
    """

    def __init__(self, blocks: Iterable[nn.Module],
                 event: Callable[[], Event] = lambda: torch.cuda.Event(enable_timing=True)) -> None:  # type: ignore
        self._event = event
        self._measures = False
        self._began: Event | None = None
        self._spans: list[tuple[Event, Event]] = []
        self._previous: list[tuple[Event, Event]] = []
        self._hooks: list[Any] = []
        for block in blocks:  # hooks added now run next to the block: after FSDP2's before it, and after it
            self._hooks += [block.register_forward_pre_hook(self._begin), block.register_forward_hook(self._end)]

    def restart(self) -> None:
        """Leave out everything before this call."""
        self._spans, self._previous, self._measures = [], [], True

    def end_step(self) -> None:
        """Note the end of a step: only the first one after a reading is measured."""
        self._measures = False

    def seconds_per_step(self, steps: int) -> float | None:
        """Return the seconds of the step that was measured before the last call; None if there is none, or the device
        is not done with it."""
        if self._previous and not self._previous[-1][1].query():
            return None
        before, self._previous = self._previous, self._spans
        self._spans, self._measures = [], True
        return sum(began.elapsed_time(ended) for began, ended in before) / 1000 if before else None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        if self._measures and torch.is_grad_enabled():  # evaluations are no step
            self._began = self._event()
            self._began.record()

    def _end(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if self._began is not None:
            ended = self._event()
            ended.record()
            self._spans.append((self._began, ended))
            self._began = None
