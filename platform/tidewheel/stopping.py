"""One way of stopping: Ctrl-C (SIGINT) and SIGTERM save what can be saved, then end in one sentence and with the
signal's exit code, 130 or 143. A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from tidewheel.console import console

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SECONDS = 0.4
"""A terminal and a program that started us may both pass on one Ctrl-C: what follows so soon is the same wish."""
WAKE_SECONDS = 0.1
"""The same between our own signal, which ends the block, and another one that came beside it."""
INSIST_SECONDS = 1.0
SHOW_CURSOR = b"\x1b[?25h"


class Stopped(KeyboardInterrupt):
    """A signal came, and what could be saved is saved.

    Args:
        number: of the signal.
        saved: what is saved, for people; "" when there was nothing to save.
    """

    def __init__(self, number: int, saved: str = "") -> None:
        self.number, self.saved = number, saved
        super().__init__(number, saved)

    @property
    def exit_code(self) -> int:
        """As of a process that the signal ended."""
        return 128 + self.number

    def __str__(self) -> str:
        what = "interrupted" if self.number == signal.SIGINT else "stopped"
        return f"{', '.join(filter(None, (what, self.saved)))}; give the same command again to go on"


class Stop:
    """The wish to stop, inside a block of `stopping`."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        """Set by the first signal; a block that ends by itself may be told to by others, too."""
        self.by_signal = 0
        """Its number; 0: none has come."""
        self.saved = ""

    def stopped(self, saved: str = "") -> Stopped:
        """What a block raises that ends by itself."""
        return Stopped(self.by_signal, saved or self.saved)


@contextlib.contextmanager
def stopping(save: Callable[[], str] | None = None, *, ends_itself: bool = False) -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM while the block runs. Outside a main thread, where Python has no handlers, do nothing.

    The first signal runs `save`, then ends the block with `Stopped`; whatever the block raises from then on becomes
    `Stopped`. A second signal ends the process at once, also while the block cleans up.

    Args:
        save: called in a thread; returns what it saved, for people, or "".
        ends_itself: the block looks at `Stop.asked` and raises something soon.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handler = _Handler(stop, save, ends_itself)
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield stop
    except SystemExit as error:  # how Ray's own handler answers SIGTERM while Ray starts
        if error.code != signal.SIGTERM:
            raise
        raise Stopped(signal.SIGTERM) from None
    except Stopped:
        raise
    except (Exception, KeyboardInterrupt):
        if not stop.asked.is_set():
            raise
        raise stop.stopped() from None
    finally:
        handler.close()
        for number, previous in before.items():
            signal.signal(number, previous)


class _Handler:
    """See `stopping`. The block is ended by a KeyboardInterrupt, the only exception that ends a `ray.get`. Libraries
    swallow it now and then, so it is raised again until it comes through."""

    def __init__(self, stop: Stop, save: Callable[[], str] | None, ends_itself: bool) -> None:
        self._stop, self._save, self._ends_itself = stop, save, ends_itself
        self._quiet_until = 0.0
        self._wake = False
        self._over, self._ending = threading.Event(), threading.Lock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._wake:
            self._wake, self._quiet_until = False, now + WAKE_SECONDS
            if _unwinding():
                return
            raise KeyboardInterrupt
        if now < self._quiet_until or self._over.is_set():
            return
        if self._stop.asked.is_set():
            end_at_once(number)
        self._stop.by_signal, self._quiet_until = number, now + SAME_SECONDS
        self._stop.asked.set()
        if not self._ends_itself:
            threading.Thread(target=self._end_block, name="save and stop", daemon=True).start()

    def _end_block(self) -> None:
        try:
            if self._save is not None:
                console.print("stopping after a save; the same signal again ends at once", markup=False)
                self._stop.saved = self._save()
        finally:
            while self._interrupt():
                self._over.wait(INSIST_SECONDS)

    def _interrupt(self) -> bool:
        """Call the handler in the main thread; return False when the block is over."""
        with self._ending:
            if not self._over.is_set():  # else our handler may be gone
                self._wake = True
                # never SIGTERM: Ray takes our handler of it away while it shuts down
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return not self._over.is_set()

    def close(self) -> None:
        """Answer no more signals."""
        with self._ending:
            self._over.set()


def _unwinding() -> bool:
    """Return True while the interrupted block cleans up: a KeyboardInterrupt is on its way through it."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_at_once(number: int) -> NoReturn:
    """End the process without cleaning up; processes that it started find out by themselves."""
    text = b"ended at once; give the same command again to go on from what is saved\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it any more
        os.write(sys.stderr.fileno(), (SHOW_CURSOR if sys.stderr.isatty() else b"") + text)
    os._exit(128 + number)


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after a block that replaces them: Ray's print a C++ stack trace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by C, and not to be had
                signal.signal(number, handler)
