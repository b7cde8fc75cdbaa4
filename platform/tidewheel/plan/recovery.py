"""Goodput of a long run with failures: a discrete-event simulation of the recovery protocol.

Failures are a Poisson process. After a failure the run is down until the failure is detected, all ranks have a process
group again, and the state is loaded. It then repeats the work since the newest state that survived. That is the newest
committed checkpoint, or with a memory tier the newest refresh, unless its replica was lost with the node or a second
failure came during the recovery. A lost node is replaced at once, so the size stays the same.

Many traces and all intervals are simulated together as arrays. Only the failures are looped over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tidewheel.plan.config import GoodputConfig, TierConfig

GPUS_PER_NODE = 8
PARTS = ("detection", "restart", "redone", "save_stall", "refresh", "checks")


@dataclass(frozen=True)
class Goodput:
    """Goodput of one tier at one size and interval: means over the traces, as shares of the run's time."""

    gpus: int
    tier: str
    interval_seconds: float
    goodput: float
    """Share of the time that went into steps that were kept."""
    error: float
    """Standard error of that mean."""
    parts: dict[str, float]
    """Shares of the lost time, by `PARTS`."""
    failures: float
    """Failures of a run, on average."""
    mtbf_seconds: float
    """Mean time between failures."""


def young_daly(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the interval between saves with the least loss in seconds, sqrt(2 C M) (Young, CACM 1974; Daly, FGCS
    2006)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly_goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Return the exact long-run goodput of blocking saves under exponential failures, also during restarts.

    Daly (2006), equation 13, as work over expected time: tau / (M e^(R/M) (e^((tau + C)/M) - 1)).

    Args:
        interval: seconds of training between two saves, tau.
        save: seconds of a save, C.
        restart: seconds of a restart, R.
        mtbf: mean seconds between failures, M.
    """
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))


def table(config: GoodputConfig) -> list[Goodput]:
    """Simulate every size, tier and interval of `config`."""
    rows = []
    intervals = np.array(config.interval_minutes) * 60.0
    for index, gpus in enumerate(config.gpus):
        mtbf = config.failures.mtbf_seconds(gpus)
        horizon = config.days * 86_400
        trace = draw(mtbf, horizon, config.runs, np.random.default_rng((config.seed, index)))
        joining = config.seconds_per_1000_ranks * gpus / 1000
        for name, tier in config.tiers.items():
            lost = config.failures.several_share
            useful, parts = simulate(tier, intervals, trace, horizon, joining=joining, copy_lost=lost,
                                     nodes=max(2, gpus // GPUS_PER_NODE))
            for at, interval in enumerate(intervals):
                share = useful[:, at] / horizon
                rows.append(Goodput(
                    gpus, name, float(interval), float(share.mean()),
                    float(share.std(ddof=1) / math.sqrt(config.runs)),
                    {part: float(spent[:, at].mean() / horizon) for part, spent in parts.items()},
                    float(trace.counts.mean()), mtbf))
    return rows


def best(rows: list[Goodput]) -> list[Goodput]:
    """Return the best interval of each size and tier."""
    best_rows: dict[tuple[int, str], Goodput] = {}
    for row in rows:
        key = (row.gpus, row.tier)
        if key not in best_rows or row.goodput > best_rows[key].goodput:
            best_rows[key] = row
    return list(best_rows.values())


@dataclass(frozen=True)
class Trace:
    """Failures of several runs. Arrays are [runs, failures]."""

    gaps: np.ndarray
    """Seconds since the previous failure, or since the start."""
    chance: np.ndarray
    """Uniform in [0, 1): decides whether the failure also takes the replica; see `simulate`."""
    counts: np.ndarray
    """[runs]; failures before the horizon."""


def draw(mtbf: float, horizon: float, runs: int, rng: np.random.Generator) -> Trace:
    """Draw Poisson failures until every run is past the horizon.

    Args:
        mtbf: mean seconds between failures.
        horizon: seconds of a run.
        runs: number of runs.
        rng: source of randomness.
    """
    expected = horizon / mtbf
    most = int(expected + 8 * math.sqrt(expected) + 16)
    gaps = rng.exponential(mtbf, (runs, most))
    while gaps.sum(axis=1).min() <= horizon:
        gaps = np.concatenate([gaps, rng.exponential(mtbf, (runs, most))], axis=1)
    return Trace(gaps, rng.random(gaps.shape), (gaps.cumsum(axis=1) <= horizon).sum(axis=1))


def simulate(tier: TierConfig, intervals: np.ndarray, trace: Trace, horizon: float, *, joining: float = 0.0,
             copy_lost: float = 0.0, nodes: int = 2**31) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Run every trace with every interval until `horizon`.

    Args:
        tier: times of recovery and saving.
        intervals: [intervals], seconds of training between saves.
        trace: failures.
        horizon: seconds of a run.
        joining: seconds that a process group of all ranks adds to each recovery.
        copy_lost: share of the failures that also take the replica in memory.
        nodes: number of nodes. A second failure during a recovery hits the node with the replica with chance 1/nodes.

    Returns:
        Useful seconds [runs, intervals], and the seconds of each of `PARTS`, which add up to the horizon.
    """
    runs = len(trace.gaps)
    shape = (runs, len(intervals))
    tau = np.broadcast_to(intervals, shape)
    refresh_cost = tier.refresh_stall_seconds / tier.refresh_seconds if tier.refresh_seconds else 0.0
    slower = 1 + refresh_cost + tier.check_share
    # a save waits for the upload of the previous one
    stall = tier.save_stall_seconds + np.maximum(0.0, tier.upload_seconds - tau * slower)
    segment = Segments(tau, stall, slower, tier.save_stall_seconds + tier.upload_seconds)
    work, stored, left = np.zeros(shape), np.zeros(shape), np.full(shape, float(horizon))
    down = np.zeros(shape)
    parts = {name: np.zeros(shape) for name in PARTS}
    for index in range(trace.gaps.shape[1]):
        if not left.any():
            break
        gap = np.minimum(trace.gaps[:, index, None], left)
        waited = np.minimum(down, gap)
        parts["detection"] += np.minimum(waited, tier.detect_seconds)
        parts["restart"] += np.maximum(0.0, waited - tier.detect_seconds)
        reached, committed, stalled = segment.run(work, stored, gap - waited)
        parts["save_stall"] += stalled
        parts["refresh"] += (reached - work) * refresh_cost
        parts["checks"] += (reached - work) * tier.check_share
        left = left - gap
        ended = left <= 0
        recovering = gap <= down  # the failure came during the recovery from the previous one
        chance = trace.chance[:, index, None]
        replica_lost = np.where(recovering, chance < copy_lost + (1 - copy_lost) / nodes, chance < copy_lost)
        in_memory = ~replica_lost if tier.refresh_seconds else np.zeros(shape, bool)
        kept = np.floor(reached / max(tier.refresh_seconds, 1e-9)) * tier.refresh_seconds
        back = np.where(in_memory, np.maximum(kept, committed), committed)
        parts["redone"] += np.where(ended, 0.0, reached - back)
        work, stored = np.where(ended, reached, back), committed
        fallback = tier.storage_seconds if tier.refresh_seconds else tier.restart_seconds + tier.load_seconds
        recovery = np.where(in_memory, tier.restart_seconds + tier.load_seconds, fallback)
        down = tier.detect_seconds + joining + recovery
    return work, parts


@dataclass(frozen=True)
class Segments:
    """Training without a failure, in closed form. Saves are due at multiples of `tau` seconds of work."""

    tau: np.ndarray
    stall: np.ndarray
    """Seconds for which a save stops training."""
    slower: float
    """Seconds that a second of work takes."""
    commit: float
    """Seconds from the start of a save to its commit."""

    def run(self, work: np.ndarray, stored: np.ndarray,
            seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Train without a failure.

        Args:
            work: seconds of work done at the start.
            stored: work in the newest checkpoint.
            seconds: time to train.

        Returns:
            The work done at the end, the work in the newest checkpoint, and the seconds of stall.
        """
        due = (np.floor(work / self.tau + 1e-9) + 1) * self.tau  # the next save
        first = (due - work) * self.slower
        cycle = self.tau * self.slower + self.stall
        after = seconds - first
        saves = np.where(after >= 0, np.floor(after / cycle) + 1, 0.0)  # started
        since = after - (saves - 1) * cycle  # seconds since the last save started
        stalled = np.where(saves > 0, (saves - 1) * self.stall + np.minimum(since, self.stall), 0.0)
        reached = work + (seconds - stalled) / self.slower
        committed = np.clip(np.floor((after - self.commit) / cycle) + 1, 0, saves)
        return reached, np.where(committed > 0, due + (committed - 1) * self.tau, stored), stalled
