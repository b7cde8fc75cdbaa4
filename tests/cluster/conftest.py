"""The order in which two workers share the files of cluster tests."""

from __future__ import annotations

import pytest

LONGEST_FIRST = ("test_docs.py", "test_elastic.py", "test_jobs.py", "test_demo.py", "test_left_out.py",
                 "test_pipeline_kill.py", "test_two_drivers.py")
"""The files that take a minute and more. A worker that begins one of them last leaves the other without work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others keep their order, in which some share a cluster."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
