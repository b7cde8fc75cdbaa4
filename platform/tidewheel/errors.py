"""Errors whose cause a user can fix.

Every error here says what is wrong, where, and how to fix it. The command line prints the message
without a stack trace and exits with `TidewheelError.exit_code`; anything else is a bug of ours and
keeps its trace.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator


def without_credentials(text: str) -> str:
    """A text without the user and password of any URI in it."""
    return re.sub(r"://[^/@\s]*@", "://", text)


class TidewheelError(Exception):
    """A problem that a user can fix. Its message leaves out user names and passwords of URIs.

    Args:
        what: what is wrong, with the offending value.
        where: the file, key or URI it is in.
        fix: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = map(without_credentials, (what, where, fix))
        super().__init__(self.what, self.where, self.fix)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  fix: {self.fix}" if self.fix else text

    def __reduce__(self):  # keyword-only arguments survive the trip from a Ray worker to the driver
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(cls: type[TidewheelError], what: str, where: str, fix: str) -> TidewheelError:
    return cls(what, where=where, fix=fix)


class ConfigError(TidewheelError):
    """A configuration file or `--set` override is wrong."""


class InputError(TidewheelError):
    """The documents given to a pipeline cannot be used."""


class StorageError(TidewheelError):
    """A URI cannot be read or written: missing, refused, or damaged."""


class StorageAwayError(StorageError):
    """The store does not answer, or fails: the same call may succeed later."""


class ShardError(TidewheelError):
    """A shard set is damaged, incomplete or does not fit the model."""


class CheckpointError(TidewheelError):
    """A checkpoint is damaged, incomplete or does not fit the run."""


class OwnershipError(TidewheelError):
    """Another driver owns the run, or has taken it over."""


class ClusterError(TidewheelError):
    """The Ray cluster is missing, too small, or lost for good."""


def root_cause(error: BaseException) -> BaseException:
    """The innermost `TidewheelError` in a chain of causes (Ray wraps what its tasks raise), or `error`."""
    seen: BaseException | None = error
    found: BaseException | None = None
    visited: set[int] = set()
    while seen is not None and id(seen) not in visited:
        visited.add(id(seen))
        if isinstance(seen, TidewheelError):
            found = seen
        cause = getattr(seen, "cause", None)  # where Ray keeps it
        if not isinstance(cause, BaseException):
            cause = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        seen = cause
    return found or error


def related(error: BaseException) -> Iterator[BaseException]:
    """`error` and every error that it keeps alive: causes, contexts, the members of groups, what Ray or
    torch.distributed.checkpoint wrapped."""
    waiting: list[BaseException] = [error]
    visited: set[int] = set()
    while waiting:
        current = waiting.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        held = [current.__cause__, current.__context__, getattr(current, "cause", None)]
        held += getattr(current, "exceptions", ())  # of an exception group
        failures = getattr(current, "failures", None)  # of torch's CheckpointException, by rank
        if isinstance(failures, dict):
            held += [part for failure in failures.values() if isinstance(failure, tuple) for part in failure]
        waiting += [other for other in held if isinstance(other, BaseException)]


def clear_frames(error: BaseException) -> None:
    """Clear the local variables that `error` and all errors behind it keep alive; their tracebacks can still be
    printed. Frames that still run keep theirs."""
    for one in related(error):
        traceback.clear_frames(one.__traceback__)
