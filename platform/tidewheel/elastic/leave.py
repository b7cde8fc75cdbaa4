"""End a run early after a signal (Ctrl-C, a stopped job, a node's shutdown): the workers save, then the run ends.

A later start resumes from that save.
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
    """Let the workers of a run save if a signal comes while the block trains the run; see `stopping`.

    Args:
        run_uri: the run's folder.
        save_seconds: leave without a save that takes longer.
    """
    def save() -> str:
        step = save_now(run_uri, save_seconds)
        return "nothing new to save" if step is None else f"saved at step {step}"

    return stopping(save)


def save_now(run_uri: str, seconds: float = SAVE_SECONDS) -> int | None:
    """Ask the run's workers to save at the next step boundary; return the committed step, None without one."""
    import ray

    from tidewheel.elastic.coordinator import actor_name
    from tidewheel.elastic.nodes import NAMESPACE

    until = time.monotonic() + seconds
    try:
        coordinator: Any = ray.get_actor(actor_name(storage.store(run_uri).uri), namespace=NAMESPACE)
        while time.monotonic() < until:
            answer: Any = ray.get(coordinator.stop_run.remote(), timeout=10)
            trains, saved = answer
            if saved is not None or not trains:  # before the first step there is nothing to save
                return saved
            time.sleep(ASK_SECONDS)
    except (ValueError, ray.exceptions.RayError):  # the training has not begun, or is over
        return None
    return None
