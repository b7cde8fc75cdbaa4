"""Connecting to Ray: an existing cluster when one is named, a private one on this machine otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from tidewheel.cluster.few_processes import few_processes
from tidewheel.cluster.private_run import private_arguments
from tidewheel.console import console
from tidewheel.errors import ClusterError
from tidewheel.stopping import keeping_handlers

#: Ray's own chatter, off unless somebody asked for it by setting the variable.
QUIET = {
    "RAY_DEDUP_LOGS": "1",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

#: A small node otherwise stops its idle workers and starts new ones at each of a pipeline's short stages, which cost
#: most of the time. For clusters that we start; nobody else's is changed.
KEEP_WORKERS = {"num_workers_soft_limit": 6, "idle_worker_killing_time_threshold_ms": 600_000}
MEND = ("start a cluster with `ray start --head`, correct --address or RAY_ADDRESS (host:port or auto), or leave both "
        "out to use this machine alone")
ANSWER_SECONDS = 5.0


def _must_answer(target: str) -> None:
    """Fail in seconds when nothing listens at host:port; Ray itself tries on for more than ten minutes."""
    if target in ("local", "auto"):
        return
    host, sep, port = target.removeprefix("ray://").rpartition(":")
    if not sep or not host or not port.isdigit():
        raise ClusterError("not a Ray address", where=target, mend=MEND)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"nothing answers ({error})", where=target, mend=MEND) from None


@contextlib.contextmanager
def session(address: str | None = None, *, cpus: int | None = None) -> Iterator[str]:
    """Run a block with Ray connected; yields the address.

    Args:
        address: "auto", "host:port" or "ray://host:port". None takes RAY_ADDRESS (which a job server sets for its
            jobs), and without that starts a cluster of this machine alone, stopped when the block ends.
        cpus: CPUs of a cluster started here; all by default.

    Raises:
        ClusterError: there is no cluster at the address.
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
    # What workers print is Ray's own noise (a lost node prints pages): what matters reaches the driver as events.
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    _must_answer(target)
    began = time.monotonic()
    console.print("starting Ray on this machine" if target == "local" else f"connecting to Ray at {target}",
                  markup=False)
    try:
        with keeping_handlers():
            if target == "local":
                with few_processes():
                    ray.init(address="local", num_cpus=cpus, include_dashboard=False, _system_config=KEEP_WORKERS,
                             **private, **quiet)
            else:
                ray.init(address=target, **quiet)
    except (ConnectionError, ValueError) as error:
        raise ClusterError(f"no Ray cluster answers ({str(error).splitlines()[0]})", where=target, mend=MEND) from None
    except Exception as error:
        if target != "local" or "timed out during startup" not in str(error):
            raise
        raise ClusterError(f"Ray did not come up within {time.monotonic() - began:.0f} s", where="this machine",
                           mend="the machine is very busy or short of memory: end other work and run again") from None
    console.print(f"Ray is up after {time.monotonic() - began:.1f} s")
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        with keeping_handlers():
            ray.shutdown()
