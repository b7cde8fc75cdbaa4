"""The death of the driver's own actors, the coordinator and Ray Train's controller, while the driver lives.

The workers end with either of them. The driver then starts both again, with the run's next epoch, and training
continues from the newest copies in memory. A coordinator that is frozen does not end by itself: the driver ends it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tidewheel.errors import ClusterError

T = TypeVar("T")

logger = logging.getLogger(__name__)
MOST_LOSSES, WITHIN_SECONDS = 10, 600.0
"""The run ends after more losses in this time: the machine has too little memory, or an actor has a fault."""
ANSWER_SECONDS = 10.0
"""Time for the coordinator to answer a call."""
PING_SECONDS, PAUSE_SECONDS = 5.0, 1.0
"""Time for the coordinator to answer a ping, and between two looks for the answer."""
MISSED_PINGS = 4
"""A coordinator that has not answered at this many looks in a row, in 24 s, is frozen. The controller waits 30 s for an
answer, and then the run would fail. A driver that stood still itself misses one at most."""


class LostActorError(ClusterError):
    """One of the driver's actors died, and the workers with it."""


def is_gone(actor: Any) -> bool:
    """Return whether Ray knows that the coordinator has died. A coordinator that does not answer may be alive."""
    import ray

    try:
        ray.get(actor.lost.remote(), timeout=ANSWER_SECONDS)
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.RayError:
        return False
    return False


def lost(error: BaseException) -> LostActorError:
    """Return an error that says which failure ended an actor."""
    from tidewheel.elastic.ray_process import one_line  # imports Ray

    return LostActorError(f"the coordinator or Ray Train's controller died: {one_line(error)}", where="elastic",
                          fix="see whether the driver's machine ran out of memory (dmesg), and Ray's logs; started "
                              "again, the run continues from its newest state")


@contextlib.contextmanager
def ending_frozen(coordinator: Any) -> Iterator[None]:
    """End the coordinator if it is frozen during the block, so that the driver notices its loss.

    Nobody else watches it: its workers train on without it, but a lost worker would not be noticed, and the run's
    ownership is not renewed.

    Args:
        coordinator: its actor.
    """
    ended = threading.Event()
    threading.Thread(target=_watch, args=(coordinator, ended), name="coordinator watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(coordinator: Any, ended: threading.Event) -> None:
    import ray

    missed = 0
    listens = False  # before it does, its start may take long
    answer = coordinator.endpoint.remote()
    while not ended.wait(PAUSE_SECONDS):
        try:
            ray.get(answer, timeout=PING_SECONDS)
            missed = 0
            listens = True
            answer = coordinator.lost.remote()
        except ray.exceptions.GetTimeoutError:
            missed += listens
        except ray.exceptions.RayError:
            return  # it has ended: the controller notices
        if missed == MISSED_PINGS and not ended.is_set():
            logger.warning("the coordinator is frozen and is ended: it has not answered a ping for %g s",
                           missed * (PING_SECONDS + PAUSE_SECONDS))
            ray.kill(coordinator)
            return


def outliving(attempt: Callable[[LostActorError | None], T], clock: Callable[[], float] = time.monotonic) -> T:
    """Call `attempt` again after each loss of an actor, and return its result. Any other error is raised.

    Args:
        attempt: called with the loss that ended the attempt before, or None.
        clock: returns seconds.

    Raises:
        LostActorError: too many losses in a short time.
    """
    losses: list[float] = []
    last: LostActorError | None = None
    while True:
        try:
            return attempt(last)
        except LostActorError as error:
            now = clock()
            losses = [at for at in losses if now - at < WITHIN_SECONDS]
            losses.append(now)
            if len(losses) > MOST_LOSSES:
                raise
            last = error
            logger.warning("%s; another one continues the run", error)
