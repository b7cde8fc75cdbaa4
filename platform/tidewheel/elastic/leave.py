"""Ending a run early on purpose: upon a signal (Ctrl-C, a stopped job, a node's shutdown) the workers save, then the
run ends.

Started again, the run goes on behind that save.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from tidewheel import storage
from tidewheel.stopping import Stop, stopping

SAVE_SECONDS = 90.0
ASK_SECONDS = 0.05


def leaving(run_uri: str, *, save_seconds: float = SAVE_SECONDS) -> contextlib.AbstractContextManager[Stop]:
    """Let the workers of `run_uri` save when a signal comes while the block trains it; see `stopping`.

    Args:
        save_seconds: leave without a save that takes longer.
    """
    def save() -> str:
        step = save_now(run_uri, save_seconds)
        return "nothing new to save" if step is None else f"saved at step {step}"

    return stopping(save)


def save_now(run_uri: str, seconds: float = SAVE_SECONDS) -> int | None:
    """Ask the run's workers to save at the next step boundary; the step once it is committed, None if it is not."""
    import ray

    from tidewheel.elastic.coordinator import actor_name
    from tidewheel.elastic.nodes import NAMESPACE

    until = time.monotonic() + seconds
    try:
        coordinator: Any = ray.get_actor(actor_name(storage.store(run_uri).uri), namespace=NAMESPACE)
        while time.monotonic() < until:
            answer: Any = ray.get(coordinator.stop_run.remote(), timeout=10)
            trains, saved = answer
            if saved is not None or not trains:  # before the first step nothing is lost that is not in a checkpoint
                return saved
            time.sleep(ASK_SECONDS)
    except (ValueError, ray.exceptions.RayError):  # not training yet, or not any more
        return None
    return None
