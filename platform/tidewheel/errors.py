"""Errors whose cause a user can fix.

Every error here says what is wrong, where, and how to fix it. The command line prints the message without a stack trace
and exits with `TidewheelError.exit_code`. Any other exception is a bug in Tidewheel and keeps its stack trace.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator


def without_credentials(text: str) -> str:
    """Return a text without the user names and passwords of the URIs in it."""
    return re.sub(r"://[^/@\s]*@", "://", text)


class TidewheelError(Exception):
    """Problem that a user can fix. Its message omits the user names and passwords of URIs.

    Args:
        what: what is wrong, with the offending value.
        where: file, key or URI with the problem.
        fix: what the user can do.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = map(without_credentials, (what, where, fix))
        super().__init__(self.what, self.where, self.fix)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  fix: {self.fix}" if self.fix else text

    def __reduce__(self):  # lets keyword-only arguments survive pickling, from a Ray worker to the driver
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(cls: type[TidewheelError], what: str, where: str, fix: str) -> TidewheelError:
    return cls(what, where=where, fix=fix)


class ConfigError(TidewheelError):
    """Wrong configuration file or `--set` override."""


class InputError(TidewheelError):
    """Input of a pipeline that cannot be used."""


class StorageError(TidewheelError):
    """URI that cannot be read or written: it is missing, access is denied, or the content is damaged."""


class StorageAwayError(StorageError):
    """Store that is unavailable. The same call may succeed later."""


class ShardError(TidewheelError):
    """Shard set that is damaged, incomplete or does not fit the model."""


class RolloutError(TidewheelError):
    """Rollouts cannot be made, or too many of them fail."""


class CheckpointError(TidewheelError):
    """Checkpoint that is damaged, incomplete or does not fit the run."""


class OwnershipError(TidewheelError):
    """Run that another driver owns or has taken over."""


class ClusterError(TidewheelError):
    """Ray cluster that is missing, too small, or lost for good."""


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost `TidewheelError` in the chain of causes of `error`, or `error` if there is none.

    The chain includes the errors of tasks, which Ray wraps in errors of its own.
    """
    current: BaseException | None = error
    innermost: BaseException | None = None
    visited: set[int] = set()
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        if isinstance(current, TidewheelError):
            innermost = current
        cause = getattr(current, "cause", None)  # Ray keeps the cause here
        if not isinstance(cause, BaseException):
            cause = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        current = cause
    return innermost or error


def related(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and every error that it keeps alive.

    These are causes, contexts, members of exception groups, and errors wrapped by Ray.
    """
    pending: list[BaseException] = [error]
    visited: set[int] = set()
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        held = [current.__cause__, current.__context__, getattr(current, "cause", None)]
        held += getattr(current, "exceptions", ())  # members of an exception group
        pending += [other for other in held if isinstance(other, BaseException)]


def clear_frames(error: BaseException) -> None:
    """Clear the local variables that `error` and its `related` errors keep alive.

    The tracebacks can still be printed. Frames that are still running keep their variables.
    """
    for other in related(error):
        traceback.clear_frames(other.__traceback__)
