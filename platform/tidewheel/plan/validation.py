"""Compare the simulator with real runs: replay a run's failures with the constants of other runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidewheel import jsonlog
from tidewheel.errors import ConfigError
from tidewheel.plan.config import TierConfig
from tidewheel.plan.recovery import Trace, simulate
from tidewheel.storage import Store, store
from tidewheel.train.time_ledger import COUNTED, LedgerSummary, summarise

RECOVERY = frozenset({"detect_seconds", "restart_seconds"})


@dataclass(frozen=True)
class Observed:
    """A real run as the simulator sees it, in seconds of one worker from its first step on."""

    run: str
    workers: int
    failures: tuple[float, ...]
    """Times of the failures."""
    seconds: float
    """Time until the last worker ended."""
    goodput: float
    """Share of that time in steps that were kept, or waiting for their data, averaged over the workers."""
    step_seconds: float
    every_steps: int
    """Steps between saves."""
    refresh_steps: int
    """Steps between refreshes of the replica in memory; 0: no replica."""
    tier: TierConfig
    """Average times of recovery and saving."""


def predict(run: Observed, tier: TierConfig, step_seconds: float) -> float:
    """Return the simulated goodput of a run's failures with other constants.

    Args:
        run: the run whose failures are replayed.
        tier: times of recovery and saving.
        step_seconds: seconds of a step.
    """
    if run.refresh_steps:
        tier = tier.model_copy(update={"refresh_seconds": run.refresh_steps * step_seconds})
    gaps = np.append(np.diff(np.array([0.0, *run.failures])), np.inf)[None]
    trace = Trace(gaps, np.ones_like(gaps), np.array([len(run.failures)]))
    interval = run.every_steps * step_seconds if run.every_steps else 1e12
    useful, _ = simulate(tier, np.array([interval]), trace, run.seconds)
    return float(useful[0, 0]) / run.seconds


def predicted_beside_measured(runs: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per run with its measured and its predicted goodput.

    The constants are the mean of the other runs', of those with the same number of workers if possible, since these
    take as long to start. A single run uses its own.

    Raises:
        ConfigError: a run has no step, or was resized on purpose, which is not simulated.
    """
    observed = [observe(store(run)) for run in runs]
    lines = []
    for run in observed:
        other_runs = [other for other in observed if other is not run] or [run]
        same_size = [other for other in other_runs if other.workers == run.workers]
        steps = [other.step_seconds for other in same_size] or [run.step_seconds]
        predicted = predict(run, _mean(same_size or other_runs), sum(steps) / len(steps))
        lines.append({"run": run.run, "workers": run.workers, "failures": len(run.failures),
                      "seconds": round(run.seconds, 1), "predicted": f"{100 * predicted:.1f} %",
                      "measured": f"{100 * run.goodput:.1f} %",
                      "difference": f"{100 * (predicted - run.goodput):+.1f}"})
    return lines


def observe(run_store: Store) -> Observed:
    """Read a run's ledger and events.

    Raises:
        ConfigError: the run has no step, or was resized on purpose, which is not simulated.
    """
    events = jsonlog.read(run_store, "events.jsonl")
    config = run_store.read_json("run.json")["config"]
    summary = summarise(jsonlog.read(run_store, "ledger.jsonl"), events)
    if any(generation.ended_by == "resize" for generation in summary.generations):
        raise ConfigError("the run was resized on purpose; only failures are simulated", where=run_store.uri,
                          fix="compare a run whose number of workers was fixed")
    starts = [part["start"] for part in summary.records if part["category"] in COUNTED]
    if not starts:
        raise ConfigError("the run has not done a step", where=run_store.uri, fix="give a run that has")
    start = min(starts)
    end = summary.generations[-1].end
    parts = _of_one_worker(summary, start)
    failures, detections = _failures(summary)
    redos = [time for time in failures if time > start]
    done = len(jsonlog.read(run_store, "batches.jsonl"))
    working = sum(parts.get(name, 0.0) for name in (*COUNTED, "redone", "data_wait"))
    commits = [event["detail"] for event in events if event["kind"] == "commit"]
    saves = [event["detail"]["step"] for event in events if event["kind"] == "save"]
    uploads = [max(0.0, commit["seconds"] - commit["stall_seconds"]) for commit in commits]
    in_memory = any(event["detail"].get("tier") == "memory" for event in events if event["kind"] == "resume")
    checkpoint = config["checkpoint"]
    memory_tier = checkpoint.get("memory_tier", checkpoint.get("memory", {}))  # "memory" in runs of earlier releases
    refresh_steps = memory_tier.get("every_steps", 0) if in_memory else 0
    if refresh_steps == "auto":
        refresh_steps = _refresh_steps(jsonlog.read(run_store, "metrics.jsonl"))
    tier = TierConfig(
        detect_seconds=sum(detections) / max(1, len(detections)),
        restart_seconds=parts.get("restart", 0.0) / max(1, len(redos)), load_seconds=0.0,
        save_stall_seconds=parts.get("save_stall", 0.0) / max(1, len(saves)),
        upload_seconds=sum(uploads) / max(1, len(uploads)))
    return Observed(
        run=run_store.uri.rsplit("/", 1)[-1], workers=max(generation.workers for generation in summary.generations),
        failures=tuple(time - start for time in redos), seconds=end - start,
        goodput=sum(parts.get(name, 0.0) for name in (*COUNTED, "data_wait")) / (end - start),
        step_seconds=working / max(1, done), every_steps=_interval(saves), refresh_steps=refresh_steps, tier=tier)


def _refresh_steps(lines: Sequence[Mapping[str, Any]]) -> int:
    """Return the average number of steps between copies to the memory tier, from a run's metrics; 0 without copies."""
    kept = sorted({line["kept_step"] for line in lines if line.get("kept_step", -1) >= 0})
    return max(1, round((kept[-1] - kept[0]) / (len(kept) - 1))) if len(kept) > 1 else len(kept)


def _interval(saves: Sequence[int]) -> int:
    """Return the median number of steps between saves; 0 for fewer than two saves."""
    steps = sorted(set(saves))
    gaps = sorted(after - before for before, after in itertools.pairwise(steps))
    return gaps[len(gaps) // 2] if gaps else 0


def _of_one_worker(summary: LedgerSummary, start: float) -> dict[str, float]:
    """Return seconds by category from `start` on, averaged over the workers of each generation."""
    sizes = {generation.number: generation.workers for generation in summary.generations}
    parts: dict[str, float] = {}
    for part in summary.records:
        seconds = max(0.0, part["end"] - max(start, part["start"])) / sizes[part["generation"]]
        parts[part["category"]] = parts.get(part["category"], 0.0) + seconds
    return parts


def _failures(summary: LedgerSummary) -> tuple[list[float], list[float]]:
    """Return the time of each failure, and the seconds until it was detected, by the workers' own clocks."""
    times, seconds = [], []
    for generation in summary.generations:
        if generation.ended_by != "failure":
            continue
        lost = [part["end"] - part["start"] for part in summary.records
                if part["generation"] == generation.number and part["category"] == "detection"]
        seconds.append(sum(lost) / generation.workers)
        times.append(generation.end - seconds[-1])
    return times, seconds


def _mean(runs: Sequence[Observed]) -> TierConfig:
    """Return mean times: of recoveries over all failures, of saves over the runs."""
    failures = sum(len(run.failures) for run in runs)
    means = {}
    for name in TierConfig.model_fields:
        values = [(getattr(run.tier, name), len(run.failures) if failures and name in RECOVERY else 1) for run in runs]
        means[name] = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    return TierConfig(**means)
