"""The death of the driver's own actors, the coordinator and Ray Train's controller, while the driver lives.

The workers end with either of them. The driver then starts both again, with the run's next epoch, and training
continues from the newest copies in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tidewheel.errors import ClusterError

T = TypeVar("T")

logger = logging.getLogger(__name__)
MOST_LOSSES, WITHIN_SECONDS = 10, 600.0
"""The run ends after more losses in this time: the machine has too little memory, or an actor has a fault."""
ANSWER_SECONDS = 10.0
"""Time for the coordinator to answer a call."""


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
