"""Check many values in one test. A parametrized test costs milliseconds for each value in every worker of pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def every(values: Iterable[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Call the decorated test for each value, and fail with the values that fail and why.

    Args:
        values: arguments of the test, at least one.
    """
    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            count = 0
            for value in values:
                count += 1
                try:
                    check(value)
                except AssertionError as error:
                    failures.append(f"{value}: {error}")
            assert count, "nothing to check"
            assert not failures, "\n".join(failures)

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate
