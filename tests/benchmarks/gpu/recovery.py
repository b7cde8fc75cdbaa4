"""Recovery in place on one GPU: of two workers one is killed and its successor is frozen.

The run must end with the bits of an undisturbed one.
"""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.pair import shared_device
from tests.cluster.in_place import SMALL, Group, prepare
from tests.unit.train.helpers import config
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import worker
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.cuda_environment import prepare_environment
from tidewheel.train.local_device import local_device

SHAPE = ("model.dim=64", "model.attention=masked", "steps=120", "metrics.trackers=[]")
"""Settings on top of the in-place tests': heads wide enough for a GPU, a kernel for fp32, and no tensorboardX."""
WAIT_SECONDS = 90.0


def in_place(case: Case) -> dict[str, Any]:
    """Measure how long recovery takes, and compare the result with an undisturbed run's."""
    Coordinator._watch = lambda self: None  # type: ignore[method-assign]  # it would ask Ray for lost nodes
    with shared_device(case.device) as way, tempfile.TemporaryDirectory(prefix="tidewheel-recovery-") as folder:
        root = Path(folder)
        group = Group(prepare(root, *SHAPE), root, fault=on_gpu if case.device == "cuda" else on_cpu)
        try:
            figures = _disturb(group)
        finally:
            group.end()
        quiet = config(root, "quiet", *SMALL, *SHAPE, "checkpoint.every_steps=25", "reproducible=true")
        fit_local(quiet, device=local_device(case.device))
        same = digest(group.settings.run_uri).state == digest(quiet.run_uri).state
    return {**figures, "valid": same, "same_bits_as_undisturbed": same, "note": f"two workers on one device: {way}"}


def _disturb(group: Group) -> dict[str, Any]:
    """Kill a worker and freeze its successor; return the seconds from each signal to the first step without it."""
    def recovered(times: int) -> float:
        """Return when the run had recovered so many times."""
        group.wait(lambda: len(group.events("recovered")) == times, WAIT_SECONDS)
        return float(group.events("recovered")[-1]["time"])

    group.add("a", "b", anew=True)
    group.wait(lambda: group.step() >= 5, WAIT_SECONDS)
    survivor = group.processes["a"].pid
    killed_at = time.time()
    group.signal("b", signal.SIGKILL)
    killed = recovered(1) - killed_at
    group.add("c")
    recovered(2)
    frozen_at = time.time()
    group.signal("c", signal.SIGSTOP)
    frozen = recovered(3) - frozen_at
    group.signal("c", signal.SIGCONT)
    (Path(group.settings.run.uri) / "hurry").touch()
    group.wait(lambda: group.store.exists("result.json"), WAIT_SECONDS)
    failures = [event["detail"]["recovery"] for event in group.events("failure")]
    if failures != ["in_place", "in_place"] or group.processes["a"].pid != survivor:
        raise RuntimeError(f"the survivor did not go on in place: {failures}")
    return {"killed_seconds": killed, "frozen_seconds": frozen,
            "heartbeat_seconds": group.settings.elastic.heartbeat_seconds}


def on_gpu(node: str, path: Path) -> None:
    """Let a worker train on the GPU, which without Ray nobody assigns to it.

    Args:
        node: its node.
        path: not used.
    """
    prepare_environment()
    torch.cuda.set_device(0)
    worker._device = lambda config: torch.device("cuda", 0)


def on_cpu(node: str, path: Path) -> None:
    """Let a worker use a backend that fails as NCCL does.

    Args:
        node: its node.
        path: not used.
    """
    from tests import nccl_like

    prepare_environment()
    nccl_like.install()
