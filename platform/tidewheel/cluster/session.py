"""Connect to Ray: to the cluster that is named, or else to a private one on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from tidewheel.cluster.few_processes import few_processes
from tidewheel.cluster.patient_start import patient_start
from tidewheel.cluster.private_run import private_arguments
from tidewheel.console import console
from tidewheel.errors import ClusterError
from tidewheel.stopping import keeping_handlers

#: Turn Ray's own messages off, unless the user has set the variable.
QUIET = {
    "RAY_DEDUP_LOGS": "1",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

#: By default a small node stops its idle workers and starts new ones at each short stage of a pipeline, which takes
#: most of the time. These settings apply to clusters that Tidewheel starts.
KEEP_WORKERS = {"num_workers_soft_limit": 6, "idle_worker_killing_time_threshold_ms": 600_000}
MEND = ("start a cluster with `ray start --head`, correct --address or RAY_ADDRESS (host:port or auto), or leave both "
        "out to use this machine alone")
ANSWER_SECONDS = 5.0


def _must_answer(target: str) -> None:
    """Fail within seconds if nothing listens at host:port; Ray itself tries for more than ten minutes."""
    if target in ("local", "auto"):
        return
    host, sep, port = target.removeprefix("ray://").rpartition(":")
    if not sep or not host or not port.isdigit():
        raise ClusterError("not a Ray address", where=target, fix=MEND)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"nothing answers ({error})", where=target, fix=MEND) from None


@contextlib.contextmanager
def session(address: str | None = None, *, cpus: int | None = None) -> Iterator[str]:
    """Connect to Ray during the block; yield the cluster's address.

    Args:
        address: "auto", "host:port" or "ray://host:port". None uses RAY_ADDRESS, which a job server sets for its jobs;
            without it a private cluster of this machine starts, and stops when the block ends.
        cpus: CPUs of a private cluster; None for all.

    Raises:
        ClusterError: no cluster answers at the address, or a private one does not start.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    target = address or os.environ.get("RAY_ADDRESS") or "local"
    if target != "local":
        from tidewheel.cluster.background import show_token

        show_token(target)
    private = private_arguments() if target == "local" else {}
    import ray

    if ray.is_initialized():
        yield ray.get_runtime_context().gcs_address
        return
    # The output of Ray's workers is noise: a lost node prints pages. What matters reaches the driver as events.
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    _must_answer(target)
    began = time.monotonic()
    console.print("starting Ray on this machine" if target == "local" else f"connecting to Ray at {target}",
                  markup=False)
    try:
        with keeping_handlers():
            if target == "local":
                with few_processes(), patient_start():
                    ray.init(address="local", num_cpus=cpus, include_dashboard=False, _system_config=KEEP_WORKERS,
                             **private, **quiet)
            else:
                ray.init(address=target, **quiet)
    except (ConnectionError, ValueError) as error:
        raise ClusterError(f"no Ray cluster answers ({str(error).splitlines()[0]})", where=target, fix=MEND) from None
    except Exception as error:
        if target != "local" or "timed out during startup" not in str(error):
            raise
        raise ClusterError(f"Ray did not come up within {time.monotonic() - began:.0f} s", where="this machine",
                           fix="the machine is very busy or short of memory: end other work and run again") from None
    console.print(f"Ray is up after {time.monotonic() - began:.1f} s")
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        with keeping_handlers():
            ray.shutdown()
