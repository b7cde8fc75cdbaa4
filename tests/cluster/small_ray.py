"""Ray in this process, without a dashboard."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator

from tidewheel.cluster.few_processes import few_processes
from tidewheel.cluster.patient_start import patient_start
from tidewheel.cluster.session import KEEP_WORKERS


@contextlib.contextmanager
def small_ray(cpus: int) -> Iterator[None]:
    """Run Ray with this many CPUs during the block."""
    import ray

    folder = tempfile.mkdtemp(prefix="twp-", dir="/tmp")  # short: socket paths are limited
    with few_processes(), patient_start():
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR, _temp_dir=folder,
                 _system_config=KEEP_WORKERS)
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
