"""Settings of the workers of a run: their number and resources, and how the run recovers."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.placement import PlacementConfig
from tidewheel.train.node_checks_config import NodeChecksConfig


class ElasticConfig(Config):
    """Number of workers, their resources, and how the run recovers."""

    min_workers: int = Field(default=1, ge=1)
    """Least number of workers; with fewer the run waits."""
    max_workers: int = Field(default=1, ge=1)
    """Largest number of workers."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """CPUs reserved, and threads used, per worker."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """GPUs reserved per worker; 0: train on CPU."""
    resources_per_worker: dict[str, float] = Field(default_factory=dict)
    """Further resources reserved per worker, by the names that nodes offer them under: {accelerator: 1}."""
    max_failures: int = Field(default=-1, ge=-1)
    """Give up after this many failures of any cause, including lost nodes; -1: never, because a long run on spot nodes
    loses thousands."""
    max_failures_without_progress: int = Field(default=3, ge=-1)
    """Give up after this many failures in a row without a new furthest step, if the run itself causes them: errors that
    workers on several nodes raise, or a run's only worker. Lost workers and nodes do not count. -1: never; the pauses
    between tries grow. The default tries each way to recover once."""
    backoff_seconds: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Pause before the third try in a row without progress; it doubles with each further try. The first two tries are
    immediate, because most failures are over by then."""
    max_backoff_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Longest pause between two tries."""
    readmit_after_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """How long to leave out a device or node whose errors have ended a generation twice. Then a worker there probes
    itself and is readmitted. The time doubles with each further failure, so that a broken GPU costs few attempts."""
    readmit_at_most_seconds: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Longest time to leave out a device or node. Its failures are forgotten after twice this time."""
    join_wait_seconds: float = Field(default=5.0, ge=0)
    """Wait this long after a node joins for further nodes, so that they join in one resize."""
    resize_interval_seconds: float = Field(default=10.0, gt=0)
    """Least time between two decisions whether to grow."""
    hold_seconds: float = Field(default=60.0, gt=0)
    """Call off a planned change when the workers have not saved and stopped after this long."""
    slow_worker: Literal["ignore", "report", "replace"] = "report"
    """What to do about a worker that is `slow_factor` times slower than the median of all workers for
    `metrics.straggler.window` readings in a row. report: record an event with its rank, node and factor. replace: also
    drain its node if the run is faster without it, because a standby worker takes over or the remaining workers make
    up for it. The node is used again only when there is no other."""
    slow_factor: float = Field(default=1.5, gt=1)
    """See `slow_worker`."""
    share_by_speed_every_steps: int = Field(default=0, ge=0)
    """Steps between two looks at how fast the workers are. A slower one then computes fewer virtual ranks of each step,
    so that workers on different devices are done at the same time. In reproducible mode the result has the same bits.
    For `parallel.data` ddp and zero1 without other dimensions. 0: all have the same share."""
    start_timeout_seconds: float = Field(default=120.0, gt=0)
    """Fail when fewer than the least number of workers can be placed for this long. Also the time limit for the start
    of a process."""
    recovery: Literal["in_place", "kept", "plain"] = "in_place"
    """What to try first after a failure; if it does not help, the next is tried. in_place: the remaining processes
    continue on their own. kept: Ray Train restarts its workers in the processes that still answer. plain: Ray Train
    restarts them in new processes."""
    standby_workers: int = Field(default=0, ge=0)
    """Warm workers beyond max_workers, where there is room, that replace a lost worker at once."""
    heartbeat_seconds: float = Field(default=3.0, gt=0)
    """Cut off a worker that gives no sign of life for this long while others wait for it."""
    leave_seconds: float = Field(default=5.0, gt=0)
    """Cut off a worker that does not leave a broken generation within this time, or within six times this time while
    its training thread uses the CPU. An idle machine takes far less, and a hung worker delays the others."""
    relay_workers: int = Field(default=512, ge=0)
    """With `max_workers` of this many and a memory tier, the workers of a node share one connection to the coordinator,
    through the memory agent of their node. A worker whose agent is silent for a quarter of `heartbeat_seconds` goes on
    with a connection of its own. 0: each worker has its own, however many there are."""
    node_checks: NodeChecksConfig = NodeChecksConfig()
    """Tests that a node must pass, and what its failures in the past mean."""
    placement: PlacementConfig = PlacementConfig()
    """Nodes that workers run on. Others are not counted, and an autoscaler is not asked for them."""

    @pydantic.field_validator("resources_per_worker")
    @classmethod
    def _further(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in ("CPU", "GPU"):
                raise ValueError(f"{name} has a setting of its own: {name.lower()}s_per_worker")
            if amount <= 0:
                raise ValueError(f"{amount:g} {name}: amounts are positive")
        return value

    @property
    def needs(self) -> dict[str, float]:
        """Resources reserved per worker, by Ray's names."""
        gpus = {"GPU": self.gpus_per_worker} if self.gpus_per_worker else {}
        return {"CPU": self.cpus_per_worker, **gpus, **self.resources_per_worker}

    @property
    def relayed(self) -> bool:
        """Whether the workers of a node share a connection."""
        return 0 < self.relay_workers <= self.max_workers

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> ElasticConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} is more than max_workers {self.max_workers}")
        return self
