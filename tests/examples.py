"""How many examples a property test draws when it needs more or fewer than the profile's 50."""

from __future__ import annotations

from hypothesis import settings

USUAL = 50
"""Examples of a test without `examples` in `make test`; see `tests/conftest.py`."""


def examples(count: int) -> settings:
    """Draw `count` examples in `make test`, and as many times more in `make long` as other tests do: ten times."""
    return settings(max_examples=max(1, count * settings.default.max_examples // USUAL))
