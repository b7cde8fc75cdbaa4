"""Ending a run early on purpose: SIGTERM (a stopped job, a node's shutdown) lets the workers save, then the run ends.

Started again, the run goes on behind that save.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from tidewheel import storage

SAVE_SECONDS = 90.0
ASK_SECONDS = 0.05
EXIT_CODE = 128 + signal.SIGTERM


class Stopped(BaseException):
    """SIGTERM came and what could be saved is saved. Not an Exception: nothing on the way up shall handle it."""

    def __init__(self, saved_step: int | None) -> None:
        self.saved_step = saved_step
        super().__init__("stopped" if saved_step is None else f"stopped, saved at step {saved_step}")


@contextlib.contextmanager
def leaving_on_sigterm(run_uri: str, *, save_seconds: float = SAVE_SECONDS) -> Iterator[None]:
    """While the block trains `run_uri`: the first SIGTERM asks for a save and then raises `Stopped` in the block, a
    second one raises it at once. Only in a main thread; elsewhere signals are not ours.

    Args:
        save_seconds: leave without a save that takes longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    saved: list[int | None] = []
    asked, over, ending = threading.Event(), threading.Event(), threading.Lock()

    def save_then_leave() -> None:
        saved.append(save_now(run_uri, save_seconds))
        with ending:
            if not over.is_set():  # else our handler may be gone, and the signal would end the process
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # the second one, see on_signal

    def on_signal(number: int, frame: Any) -> None:
        if over.is_set():
            return
        if asked.is_set():
            raise KeyboardInterrupt  # the only exception that ends a `ray.get`
        asked.set()
        threading.Thread(target=save_then_leave, name="save and leave", daemon=True).start()

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    except KeyboardInterrupt:
        if not asked.is_set():
            raise
        raise Stopped(saved[0] if saved else None) from None
    finally:
        over.set()
        with ending:
            signal.signal(signal.SIGTERM, before)


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
