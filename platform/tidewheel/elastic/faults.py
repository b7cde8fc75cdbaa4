"""What a worker says about the error that ended its generation: its own, or an echo of another's.

When one rank fails, the collectives of all others break, and so does whatever they do next. These errors say nothing
about the worker that raises them. `elastic.blame` decides what follows from the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tidewheel.elastic.generation import ExitReason
from tidewheel.errors import CheckpointError, StorageAwayError, TidewheelError, root_cause

#: Mistakes in the code: starting again does not fix them.
MISTAKES = (TypeError, AttributeError, NameError, ImportError, AssertionError, KeyError, IndexError, ValueError)
#: What gloo, NCCL and our own groups say when another rank is gone; gloo raises plain RuntimeErrors.
_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|process group|communicator"
                     r"|the generation has ended", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """How a worker left its generation."""

    how: ExitReason
    text: str = ""
    kind: str = ""
    """Class of the error it raised by itself; "": it raised none, or an echo."""
    accused: tuple[int, ...] = ()
    """Ranks that stand still, it says."""


def report(error: BaseException, *, broken: bool, stepped: bool) -> Report:
    """Say what `error`, which ended a worker's generation, means.

    Args:
        error: what training raised.
        broken: the generation's connections were broken off before, so that nothing that follows is this worker's.
        stepped: the run has done a step. Before that, storage that is away is a wrong address.
    """
    from tidewheel.train.guards.hang import HangError, behind

    cause = root_cause(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, HangError):
        return Report(ExitReason.FAILED, text, accused=behind(str(error)))
    ours = isinstance(cause, TidewheelError)
    # what is asked of storage is broken off with the connections, checkpoints then fail, and mistakes come up that are
    # none
    follows = not ours or isinstance(cause, (CheckpointError, StorageAwayError))
    if any(map(_is_echo, _chain(error))) or (broken and follows):
        return Report(ExitReason.FAILED, text)
    away = isinstance(cause, StorageAwayError) and stepped
    final = isinstance(cause, (TidewheelError, *MISTAKES)) and not away
    return Report(ExitReason.FATAL if final else ExitReason.FAILED, text, type(cause).__name__)


def _is_echo(error: BaseException) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it was raised from."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)  # type: ignore
