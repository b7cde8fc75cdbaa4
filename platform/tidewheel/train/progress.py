"""The progress bar of a training run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tidewheel.console import bars


@contextlib.contextmanager
def training_bar(steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields the `on_progress(progress)` that `fit` takes; `progress` has step and, once known, loss,
    tokens_per_second and world_size."""
    with bars() as group, group.bar("training", steps, unit="steps") as bar:

        def on_progress(progress: dict[str, Any]) -> None:
            parts = []
            if (loss := progress.get("loss")) is not None:
                parts.append(f"loss {loss:.3f}")
            if speed := progress.get("tokens_per_second"):
                parts.append(f"{speed:,.0f} tokens/s")
            if workers := progress.get("world_size"):
                parts.append(f"{workers} worker{'s' if workers > 1 else ''}")
            bar.update(progress.get("step") or 0, note=", ".join(parts) or progress.get("state", ""))

        yield on_progress
