"""Find out that the run has another owner while its coordinator is silent.

A driver whose machine freezes does not end its workers, and Ray does not either until it declares the machine dead.
Their connections stay open, because the kernel of a stopped process still acknowledges what it gets. So workers notice
by themselves: the coordinator answers their messages (`connection.answer_seconds`), and one that is not answered reads
the run's commit log. If a newer epoch owns the run, nothing that the worker does counts any more, and it ends.

The new driver could also look the old workers up in Ray and kill them. That needs a name for every worker, reaches only
its own Ray cluster, and kills by name what may belong to a healthy run. An epoch in the commit log cannot be wrong: of
two drivers that race for the run, the log has only one newest, and its workers read their own epoch there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tidewheel import storage
from tidewheel.commit_log import CommitLog, taken_over
from tidewheel.elastic.connection import Endpoint, answer_seconds
from tidewheel.errors import StorageError
from tidewheel.ownership import CHECKPOINTS
from tidewheel.retry import JITTER

logger = logging.getLogger(__name__)

SILENT_SECONDS = 5.0
"""Ask storage when the coordinator has not answered for this long, or for `MISSED_ANSWERS` if that is longer."""
MISSED_ANSWERS = 3
AGAIN_SECONDS = 5.0
"""Time between two questions of a worker, on average, in a run of up to 250 workers without relays."""
QUESTIONS_A_SECOND = 50
"""Questions of all workers and relays of a run together, on average. Each is two requests to the store."""
LOOK_SECONDS = 0.5


class OwnerWatch:
    """A thread that asks storage for the run's owner while the coordinator does not answer, and only then.

    Args:
        endpoint: names the run and its epoch; with an epoch of -1 nothing is asked.
        unanswered: returns the seconds since the first message that the coordinator has not answered; 0.0 for none.
        on_taken_over: called once, in the thread, with the reason if a newer epoch owns the run.
        represented: returns the number of workers for which this thread asks.
    """

    def __init__(self, endpoint: Endpoint, unanswered: Callable[[], float], on_taken_over: Callable[[str], None], *,
                 represented: Callable[[], int] = lambda: 1) -> None:
        self._endpoint = endpoint
        self._unanswered = unanswered
        self._on_taken_over = on_taken_over
        self._represented = represented
        self._closed = threading.Event()
        if endpoint.epoch >= 0:
            threading.Thread(target=self._watch, name="owner watch", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if self._is_silent():
                # not all workers at once, and after a moment for one that stood still itself to read its answers
                self._closed.wait(LOOK_SECONDS + JITTER.random() * self._spread())
                self._ask_while_silent()

    def _ask_while_silent(self) -> None:
        while self._is_silent() and not self._closed.is_set():
            reason = self._reason()
            if reason:
                self._closed.set()
                self._on_taken_over(reason)
                return
            self._closed.wait(JITTER.uniform(0.75, 1.25) * max(AGAIN_SECONDS, self._spread()))

    def _is_silent(self) -> bool:
        return self._unanswered() >= max(SILENT_SECONDS, MISSED_ANSWERS * answer_seconds(self._connections()))

    def _spread(self) -> float:
        """Return the seconds in which all workers of the run may ask once."""
        return self._connections() / QUESTIONS_A_SECOND

    def _connections(self) -> int:
        """Return the number of connections to the coordinator, if all are like this one."""
        return self._endpoint.workers // max(1, self._represented())

    def _reason(self) -> str:
        """Return why the workers must end; "" if the run is still theirs, or if storage does not tell."""
        try:
            log = CommitLog(storage.store(self._endpoint.run).child(CHECKPOINTS))
            head = log.head()
        except StorageError as error:
            logger.warning("the coordinator is silent, and the run's owner is unknown: %s", error)
            return ""
        epoch = -1 if head is None else head.epoch
        logger.info("the coordinator has not answered for %.1f s; epoch %d owns the run, and this process is of %d",
                    self._unanswered(), epoch, self._endpoint.epoch)
        if head is None or head.epoch <= self._endpoint.epoch:
            return ""
        return taken_over(log.checkpoints.uri, head).what
