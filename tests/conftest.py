"""Settings for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# tests with their own home folder still find the machine code of kernels that are compiled here
os.environ.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))

# There is no deadline, since a kernel compiles in its first example and CI machines are busy. `make test` draws the
# same examples each time, so that only a change can make it fail. HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("tidewheel", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tidewheel"))

LONGEST_FIRST = (
    "unit/test_types.py",
    "cluster/test_docs.py", "cluster/test_elastic.py", "cluster/test_jobs.py", "cluster/test_demo.py",
    "cluster/test_left_out.py", "chaos/test_pipeline_kill.py", "cluster/test_two_drivers.py",
    "unit/train/reproducible/test_ranks.py", "unit/test_storage_faults.py", "unit/train/parallel/test_equivalence.py",
    "unit/checkpoint/test_saves_in_time.py", "unit/data/readers/test_bombs.py", "unit/train/test_storage_misbehaves.py",
    "unit/test_typed_sdk.py", "unit/test_storage.py", "unit/train/parallel/test_checkpoints.py", "unit/test_retry.py",
    "unit/train/parallel/test_resharding.py", "unit/checkpoint/memory_tier/test_orphans.py", "unit/train/test_loop.py")
"""Files that take about 20 seconds or more. Files that compute alternate with files that wait for a store.

pytest-xdist hands out whole files. A worker that begins a long file last leaves the others without work.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first. The others keep their order, in which some share a cluster."""
    tests = Path(__file__).parent
    ranks = {tests / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
