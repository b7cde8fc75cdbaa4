"""Settings for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

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
    "cluster/test_docs.py", "cluster/data/test_pipeline.py", "unit/test_types.py", "cluster/test_elastic.py",
    "unit/train/reproducible/test_ranks.py", "cluster/test_demo.py", "unit/test_storage.py", "cluster/test_jobs.py",
    "unit/train/parallel/test_equivalence.py", "cluster/test_wheel.py", "unit/data/readers/test_bombs.py",
    "cluster/test_same_bytes.py", "unit/train/parallel/test_async_tensor.py", "cluster/test_two_drivers.py",
    "unit/test_storage_faults.py", "cluster/test_left_out.py", "unit/train/parallel/test_families.py",
    "cluster/test_pipeline_storage.py", "unit/train/parallel/test_checkpoints.py", "cluster/test_local_cluster.py",
    "unit/train/test_storage_misbehaves.py", "cluster/test_blips.py", "unit/train/test_settle.py",
    "cluster/test_background.py", "unit/checkpoint/test_saves_in_time.py", "cluster/test_placement.py",
    "unit/test_retry.py", "cluster/test_in_place.py", "unit/train/test_running_ahead.py", "chaos/test_pipeline_kill.py",
    "unit/train/test_bad_steps.py", "cluster/test_stops.py", "unit/test_layout.py", "cluster/test_nccl_like.py",
    "unit/train/reproducible/test_resume.py", "cluster/test_busy_survivor.py",
    "unit/checkpoint/memory_tier/test_orphans.py", "unit/stores/test_object_faults.py",
    "unit/checkpoint/test_corruption.py", "k8s/test_lint.py", "unit/data/text/test_kernel_cache.py",
    "unit/train/test_fp8.py", "unit/train/parallel/test_pipeline.py", "unit/train/parallel/test_tensor.py",
    "unit/train/parallel/test_resharding.py", "unit/elastic/test_age.py", "unit/test_secrets.py",
    "unit/test_gpu_benchmark.py", "unit/train/test_loop.py")
"""Files that take about 15 seconds or more. Files that wait for a cluster alternate with files that compute.

pytest-xdist hands out whole files. A worker that begins a long file last leaves the others without work.
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler for `--dist loadfile`; None leaves the choice to pytest-xdist."""
    from tests.scheduler import FilesAndFolders

    return FilesAndFolders(config, log) if config.getvalue("dist") == "loadfile" else None


YOUNG_OBJECTS = 50_000
"""New objects after which a collection begins, instead of Python's 700: of 62 CPU seconds of tests it saves 5."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, and let later collections skip the modules and tests.

    The modules and tests are a million objects that nobody frees. To look through them again and again is a quarter of
    the time, in each process of pytest-xdist.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first. The others keep their order, in which some share a cluster."""
    tests = Path(__file__).parent
    ranks = {tests / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
