"""Trace chosen steps: what ran when on the host and the device, and which code allocated memory."""

from __future__ import annotations

import contextlib
import gzip
import shutil
from typing import Any

import torch

from tidewheel.private_folders import temporary_folder
from tidewheel.storage import Store
from tidewheel.train.metrics.config import ProfileConfig

FOLDER = "profile"
MOST_ALLOCATIONS = 100_000
"""Newest allocations to keep for a memory snapshot."""


def ranges(steps: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of consecutive steps."""
    result: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if result and result[-1][1] == step - 1:
            result[-1] = (result[-1][0], step)
        else:
            result.append((step, step))
    return result


class Profiler:
    """Profiles the configured steps of this process.

    `profile/steps_10-11.json.gz` is a trace for https://ui.perfetto.dev, `profile/steps_10-11.memory.pickle` one for
    https://pytorch.org/memory_viz.

    Args:
        config: the steps, and what to trace.
        store: the run's store.
        device: device that trains; on CUDA its kernels are traced too.
    """

    def __init__(self, config: ProfileConfig, store: Store, device: torch.device) -> None:
        self._config = config
        self._store = store
        self._device = device
        self._ranges = ranges(config.steps)
        self._starts = {first for first, _ in self._ranges}
        self._ends = dict(self._ranges)
        self._running: Any = None
        self._first = 0

    def begin(self, step: int) -> None:
        """Start a profile if `step` is the first of its range."""
        if step not in self._starts or self._running is not None:
            return
        self._first = step
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities, record_shapes=True,
                                               profile_memory=self._config.memory, with_stack=self._config.stacks)
        self._running.__enter__()

    def end(self, step: int) -> list[str]:
        """End the profile if `step` is the last of its range; return the URIs of the files."""
        if self._running is None or step < self._ends[self._first]:
            return []
        running = self._running
        self._running = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the trace ends with the step's last kernel
        running.__exit__(None, None, None)
        name = f"{FOLDER}/steps_{self._first}-{step}"
        written = [self._write_trace(running, f"{name}.json.gz")]
        if self._memory:
            with temporary_folder("profile") as folder:
                path = folder / "memory.pickle"
                torch.cuda.memory._dump_snapshot(str(path))  # its format is torch's; nothing here reads it
                self._store.write(f"{name}.memory.pickle", path.read_bytes())
            torch.cuda.memory._record_memory_history(enabled=None)
            written.append(self._store.at(f"{name}.memory.pickle"))
        return written

    def close(self) -> None:
        """Stop a profile in progress without writing it."""
        if self._running is not None:
            with contextlib.suppress(Exception):  # the run ends for another reason, which matters more
                self._running.__exit__(None, None, None)
            self._running = None

    @property
    def _memory(self) -> bool:
        return self._config.memory and self._device.type == "cuda"

    def _write_trace(self, running: Any, key: str) -> str:
        with temporary_folder("profile") as folder:
            path = folder / "trace.json"
            running.export_chrome_trace(str(path))
            with path.open("rb") as trace, self._store.writer(key) as sink, gzip.GzipFile(
                    fileobj=sink, mode="wb") as packed:  # type: ignore[call-overload]
                shutil.copyfileobj(trace, packed)
        return self._store.at(key)
