"""Whether an error that ended a worker's generation is the worker's own, or an echo of another worker's failure.

When one rank fails, the collectives of all others break, and so does whatever uses their results. These errors do not
say anything about the worker that raises them. `elastic.blame` decides what follows from the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tidewheel.elastic.messages import ExitReason
from tidewheel.errors import CheckpointError, StorageAwayError, TidewheelError, root_cause

#: Mistakes in the code, which a restart does not fix.
MISTAKES = (TypeError, AttributeError, NameError, ImportError, AssertionError, KeyError, IndexError, ValueError)
#: Errors of gloo, NCCL and our own groups when another rank is gone; gloo raises plain RuntimeErrors.
_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|process group|communicator"
                     r"|the generation has ended", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """How a worker left its generation."""

    reason: ExitReason
    text: str = ""
    """The error, if one ended the generation."""
    error_kind: str = ""
    """Class of an error that the worker raised first; "" without an error, or for an echo."""
    accused: tuple[int, ...] = ()
    """Ranks that do not respond, or that computed wrongly."""
    saved_step: int | None = None
    """Step of the committed save of a preempted worker."""


def report(error: BaseException, *, broken: bool, stepped: bool) -> Report:
    """Return the report about an error that ended a worker's generation.

    Args:
        error: what training raised.
        broken: the generation's connections were broken off before, so that what follows is not this worker's fault.
        stepped: the run has done a step. Before the first step, unavailable storage means a wrong address.
    """
    from tidewheel.train.guards.hang import HangError
    from tidewheel.train.guards.verdict import SilentCorruptionError

    cause = root_cause(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (HangError, SilentCorruptionError)):
        return Report(ExitReason.FAILED, text, accused=error.ranks)
    # broken connections also break storage requests and checkpoints, and lead to mistakes that are none
    may_follow = not isinstance(cause, TidewheelError) or isinstance(cause, (CheckpointError, StorageAwayError))
    if any(map(_is_echo, _chain(error))) or (broken and may_follow):
        return Report(ExitReason.FAILED, text)
    away = isinstance(cause, StorageAwayError) and stepped
    fatal = isinstance(cause, (TidewheelError, *MISTAKES)) and not away
    return Report(ExitReason.FATAL if fatal else ExitReason.FAILED, text, type(cause).__name__)


def _is_echo(error: BaseException) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and the errors that it was raised from."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
