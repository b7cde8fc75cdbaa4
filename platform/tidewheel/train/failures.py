"""Distinguish passing failures, such as a service that does not respond, from mistakes in the code of a part."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

from tidewheel.errors import ConfigError, StorageAwayError
from tidewheel.parts import MISTAKES, Part, name_of

PATH_MISTAKES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the operating system for a wrong path, which a retry does not fix."""
CODE_MISTAKES = (*MISTAKES, *PATH_MISTAKES, AssertionError)
"""Errors of a callback or tracker that its author must fix."""


def is_passing(error: BaseException) -> bool:
    """Return whether an error comes from a network, service, store or disk that may work again later.

    The check includes causes, because client libraries raise their own errors `from` that of the connection. A mistake
    in code that handles such an error is still a mistake.
    """
    if isinstance(error, (OSError, StorageAwayError)):  # ConnectionError and TimeoutError are OSErrors
        return not isinstance(error, PATH_MISTAKES)
    if isinstance(error, CODE_MISTAKES):
        return False
    return any(isinstance(cause, (OSError, StorageAwayError)) and not isinstance(cause, PATH_MISTAKES)
               for cause in _causes(error))


def mistake(part: Part, role: str, method: str, error: BaseException) -> ConfigError:
    """Return an error that names the failed part and the line of its code.

    Args:
        part: the part whose code raised.
        role: kind of the part, such as "callback".
        method: the method that was called.
        error: the error that it raised.
    """
    file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return ConfigError(f"the {role} {name_of(type(part))} failed in {method}: {type(error).__name__}: {error}",
                       where=f"{frame.filename}:{frame.lineno}",
                       fix="correct it and start again: the run continues from its last checkpoint")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes of an error, the nearest first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
