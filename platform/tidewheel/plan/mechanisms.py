"""What each mechanism of recovery contributes: the effective time of a run with it, and with it switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidewheel.plan import recovery
from tidewheel.plan.config import GoodputConfig, TierConfig

MINUTE = 60.0
DETECTION_OFF_SECONDS = 10 * MINUTE
"""Without heartbeats and a hang watch, a collective's time limit notices a failure: 10 minutes by torch's default for
NCCL, and what ByteRobust reports for hangs."""
OPERATOR_SECONDS = 39 * MINUTE
"""Somebody looks, finds the node and starts the run again: the mean of a small team (OLMo Hybrid)."""
REPLACE_SECONDS = 10 * MINUTE
"""A node is ordered and started, as cloud providers take minutes to."""


@dataclass(frozen=True)
class Mechanism:
    """A part of recovery that may be missing."""

    name: str
    off: Callable[[TierConfig], TierConfig]
    """Returns the times without it."""


def _changed(**values: float) -> Callable[[TierConfig], TierConfig]:
    return lambda tier: tier.model_copy(update=values)


def _no_memory_tier(tier: TierConfig) -> TierConfig:
    """Every failure loads from storage, in the time that a lost copy takes with the tier."""
    return tier.model_copy(update={"load_seconds": max(tier.load_seconds, tier.storage_seconds - tier.restart_seconds),
                                   "refresh_seconds": 0.0, "refresh_stall_seconds": 0.0})


def _blocking_saves(tier: TierConfig) -> TierConfig:
    return tier.model_copy(update={"save_stall_seconds": tier.save_stall_seconds + tier.upload_seconds,
                                   "upload_seconds": 0.0})


def _no_spares(tier: TierConfig) -> TierConfig:
    """The run waits for a new node: neither a spare takes the place of a lost one, nor does the run shrink."""
    return tier.model_copy(update={"restart_seconds": tier.restart_seconds + REPLACE_SECONDS,
                                   "storage_seconds": tier.storage_seconds + REPLACE_SECONDS})


def _by_hand(tier: TierConfig) -> TierConfig:
    return tier.model_copy(update={"restart_seconds": tier.restart_seconds + OPERATOR_SECONDS,
                                   "storage_seconds": tier.storage_seconds + OPERATOR_SECONDS})


def _new_processes(tier: TierConfig) -> TierConfig:
    """All processes start anew, and with them the copy in their memory is read from the agents all the same."""
    return tier.model_copy(update={"restart_seconds": tier.new_processes_seconds,
                                   "storage_seconds": tier.storage_seconds + tier.new_processes_seconds})


MECHANISMS = (
    Mechanism("memory tier", _no_memory_tier),
    Mechanism("recovery in place", _new_processes),
    Mechanism("detection within seconds", _changed(detect_seconds=DETECTION_OFF_SECONDS)),
    Mechanism("saves in the background", _blocking_saves),
    Mechanism("spares or a smaller run", _no_spares),
    Mechanism("automatic restart", _by_hand),
    Mechanism("checks for silent corruption", _changed(check_share=0.0)))


@dataclass(frozen=True)
class EffectiveTime:
    """Effective time of a run of one size, with all mechanisms and without each."""

    gpus: int
    mtbf_seconds: float
    whole: float
    """Goodput with all of them, at the best interval between checkpoints."""
    without: dict[str, float]
    """Goodput without each one, at the best interval then."""
    none: float
    """Goodput without any of them."""


def effective_times(config: GoodputConfig) -> list[EffectiveTime]:
    """Return the effective time at each size of `config`, for its first tier.

    All cases have the same failures.

    Args:
        config: sizes, failures, intervals and times.
    """
    name, tier = next(iter(config.tiers.items()))
    tiers = {name: tier, **{mechanism.name: mechanism.off(tier) for mechanism in MECHANISMS}}
    nothing = tier
    for mechanism in MECHANISMS:
        nothing = mechanism.off(nothing)
    tiers["none"] = nothing
    best = {(row.gpus, row.tier): row for row in recovery.best(recovery.table(
        config.model_copy(update={"tiers": tiers})))}
    return [EffectiveTime(
        gpus, best[gpus, name].mtbf_seconds, best[gpus, name].goodput,
        {mechanism.name: best[gpus, mechanism.name].goodput for mechanism in MECHANISMS}, best[gpus, "none"].goodput)
        for gpus in config.gpus]
