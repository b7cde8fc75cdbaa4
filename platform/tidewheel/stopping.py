"""Stop on signals: after Ctrl-C (SIGINT) or SIGTERM, save, print one sentence and exit with code 130 or 143.

A second signal ends the process at once.
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
"""A signal that follows this soon belongs to the same Ctrl-C: a terminal and a parent process may both send one."""
WAKE_SECONDS = 0.1
"""The same after the signal that this module sends to itself to end the block."""
INSIST_SECONDS = 1.0
"""Time between two attempts to end the block."""
SHOW_CURSOR = b"\x1b[?25h"


class Stopped(KeyboardInterrupt):
    """Raised after a signal, when everything that can be saved is saved.

    Args:
        number: number of the signal.
        saved: description of what was saved, for the message; "" for nothing.
    """

    def __init__(self, number: int, saved: str = "") -> None:
        self.number, self.saved = number, saved
        super().__init__(number, saved)

    @property
    def exit_code(self) -> int:
        """Exit code of a process that the signal ends."""
        return 128 + self.number

    def __str__(self) -> str:
        what = "interrupted" if self.number == signal.SIGINT else "stopped"
        return f"{', '.join(filter(None, (what, self.saved)))}; give the same command again to continue"


class Stop:
    """Request to stop, for the code inside a block of `stopping`."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        """Set by the first signal. With `ends_itself`, other code may set it too."""
        self.by_signal = 0
        """Number of the signal; 0 before one has arrived."""
        self.saved = ""
        """Description of what was saved."""

    def stopped(self, saved: str = "") -> Stopped:
        """Return the exception with which a block ends itself."""
        return Stopped(self.by_signal, saved or self.saved)


@contextlib.contextmanager
def stopping(save: Callable[[], str] | None = None, *, ends_itself: bool = False) -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM during the block. Do nothing outside the main thread, where Python has no handlers.

    The first signal runs `save`, then ends the block with `Stopped`. Any exception that the block raises after the
    signal becomes `Stopped`. A second signal ends the process at once, even while the block cleans up.

    Args:
        save: called in a thread; returns a description of what it saved, or "".
        ends_itself: the block checks `Stop.requested` and raises an exception soon after it is set.

    Raises:
        Stopped: a signal has ended the block.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handler = _Handler(stop, save, ends_itself)
    before = {signal_number: signal.signal(signal_number, handler) for signal_number in SIGNALS}
    try:
        yield stop
    except SystemExit as error:  # raised by Ray's own SIGTERM handler while Ray starts
        if error.code != signal.SIGTERM:
            raise
        raise Stopped(signal.SIGTERM) from None
    except Stopped:
        raise
    except (Exception, KeyboardInterrupt):
        if not stop.requested.is_set():
            raise
        raise stop.stopped() from None
    finally:
        handler.close()
        for signal_number, previous in before.items():
            signal.signal(signal_number, previous)


class _Handler:
    """Signal handler of `stopping`.

    It ends the block with a KeyboardInterrupt, the only exception that interrupts `ray.get`. Libraries sometimes
    swallow it, so it is raised again until the block ends.
    """

    def __init__(self, stop: Stop, save: Callable[[], str] | None, ends_itself: bool) -> None:
        self._stop, self._save, self._ends_itself = stop, save, ends_itself
        self._quiet_until = 0.0
        self._wake = False
        self._over, self._ending = threading.Event(), threading.Lock()

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._wake:
            self._wake, self._quiet_until = False, now + WAKE_SECONDS
            if _unwinding():
                return
            raise KeyboardInterrupt
        if now < self._quiet_until or self._over.is_set():
            return
        if self._stop.requested.is_set():
            end_at_once(signal_number)
        self._stop.by_signal, self._quiet_until = signal_number, now + SAME_SECONDS
        self._stop.requested.set()
        if not self._ends_itself:
            threading.Thread(target=self._end_block, name="save and stop", daemon=True).start()

    def _end_block(self) -> None:
        try:
            if self._save is not None:
                console.print("saving, then stopping; send the signal again to end at once", markup=False)
                self._stop.saved = self._save()
        finally:
            while self._interrupt():
                self._over.wait(INSIST_SECONDS)

    def _interrupt(self) -> bool:
        """Call the handler in the main thread; return False if the block has ended."""
        with self._ending:
            if not self._over.is_set():  # otherwise this handler may be gone
                self._wake = True
                # never SIGTERM: Ray replaces its handler while shutting down
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return not self._over.is_set()

    def close(self) -> None:
        """Ignore further signals."""
        with self._ending:
            self._over.set()


def _unwinding() -> bool:
    """Return whether the interrupted block is cleaning up after a KeyboardInterrupt."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_at_once(signal_number: int) -> NoReturn:
    """End the process without cleanup; its child processes notice that by themselves."""
    text = b"ended at once; give the same command again to continue from what is saved\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed
        os.write(sys.stderr.fileno(), (SHOW_CURSOR if sys.stderr.isatty() else b"") + text)
    os._exit(128 + signal_number)


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the SIGINT and SIGTERM handlers after a block that replaces them; Ray's print a C++ stack trace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signal_number: signal.getsignal(signal_number) for signal_number in SIGNALS}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            if handler is not None:  # None: set by C code, so Python cannot restore it
                signal.signal(signal_number, handler)
