"""Decide what to do about a bad step, the same on all ranks, and count such steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidewheel.errors import ConfigError
from tidewheel.train.guards.config import GuardsConfig
from tidewheel.train.guards.detect import LOSS_SPIKE, OVERFLOW, REASONS, Detector
from tidewheel.train.positions import Positions, Window


@dataclass(frozen=True)
class Verdict:
    """Judgement of a step, and the action that follows."""

    reason: str = ""
    """One of `detect.REASONS`; "" for a good step."""
    action: str = "apply"
    """apply, ignore (applied all the same), skip, rollback or stop."""
    loss_z: float = math.nan
    """Deviations of the loss above the window's median; NaN while the window holds too few values."""
    gradient_norm_z: float = math.nan

    @property
    def applied(self) -> bool:
        """Whether the update was made."""
        return self.action in ("apply", "ignore")


class Guard:
    """Judges every step and counts the bad ones; its state is part of a checkpoint.

    Args:
        config: the policies.
        device: device of losses and norms.
        scaled: see `Detector`.
    """

    def __init__(self, config: GuardsConfig, device: torch.device, *, scaled: bool = False) -> None:
        self.config = config
        self._detector = Detector(config, device, scaled=scaled)
        self.skipped = 0
        """Steps without an update so far."""
        self.in_a_row = 0
        """Newest skipped steps in a row. Overflows do not count: the loss scale handles them."""

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Judge a step; see `Detector.judge`. All ranks call it once for each step."""
        return self._detector.judge(loss, norm)

    def verdict(self, judged: Sequence[float]) -> Verdict:
        """Return the verdict for a judgement in host numbers, and count it."""
        code, loss_z, norm_z, withheld = judged
        action = self._action(int(code))
        self.skipped += action == "skip"
        if int(code) != OVERFLOW:
            self.in_a_row = self.in_a_row + 1 if withheld else 0
        return Verdict(REASONS[int(code)], action, loss_z, norm_z)

    def _action(self, code: int) -> str:
        if code == OVERFLOW:
            return "skip"
        if code >= LOSS_SPIKE:
            return self.config.spike
        return self.config.non_finite if code else "apply"

    def check(self, verdict: Verdict, step: int, where: str) -> None:
        """Raise if this step ends the run.

        Args:
            verdict: on the step.
            step: counts from 1.
            where: the run's URI.

        Raises:
            ConfigError: the policy is to stop, or too many steps in a row were skipped.
        """
        if verdict.action == "stop":
            raise ConfigError(f"{verdict.reason} at step {step}", where=where, fix=_CALMER)
        if verdict.action == "skip" and self.in_a_row > self.config.max_skips:
            raise ConfigError(f"{self.in_a_row} steps in a row without an update up to step {step}: {verdict.reason}",
                              where=where, fix=_CALMER if "spike" not in verdict.reason else
                              f"raise guards.z_score ({self.config.z_score:g}) or set guards.spike=ignore if the level "
                              f"has changed for good; else {_CALMER}")

    def check_rollbacks(self, rollbacks: int, verdict: Verdict, step: int, where: str) -> None:
        """Raise if one more rollback is too many.

        Args:
            rollbacks: of the run so far.
            verdict: on the step.
            step: counts from 1.
            where: the run's URI.

        Raises:
            ConfigError: the run has made `guards.max_rollbacks`.
        """
        if rollbacks >= self.config.max_rollbacks:
            raise ConfigError(f"{verdict.reason} at step {step} after {rollbacks} rollbacks, "
                              f"guards.max_rollbacks is {self.config.max_rollbacks}", where=where,
                              fix=f"see which data was skipped with `tidewheel shards trace --run {where} --step "
                              f"{step}`; then raise the limit, or {_CALMER}")

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {"window": self._detector.state(), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._detector.load(state["window"])
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])


_CALMER = ("lower optimizer.learning_rate or lengthen schedule's warm-up; the same command continues from the last "
           "checkpoint")


def event(verdict: Verdict, step: int, taken: np.ndarray, digest: str | None, loss: float,
          norm: float) -> dict[str, Any]:
    """Return the detail of the event "guard". Numbers that JSON does not have are text.

    Args:
        verdict: on the step.
        step: counts from 1.
        taken: positions of its batch.
        digest: digest of its sequences.
        loss: mean loss of the global batch.
        norm: norm of the gradient before clipping.
    """
    return {"step": step, "reason": verdict.reason, "action": verdict.action, "loss": _number(loss),
            "gradient_norm": _number(norm), "loss_z": _z(verdict.loss_z),
            "gradient_norm_z": _z(verdict.gradient_norm_z), "position": int(taken[0]), "count": len(taken),
            "digest": digest}


def _z(value: float) -> float | str | None:
    return None if math.isnan(value) else _number(value)


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def window(positions: Positions, step: int, back_to: int, batches: int) -> Window:
    """Return the window that a rollback passes over.

    It holds the batches of the newest steps that are contiguous and newer than the checkpoint.

    Args:
        positions: the run's positions.
        step: the bad step.
        back_to: step of the checkpoint.
        batches: number of steps whose batches to pass over.
    """
    taken = positions.of_steps(range(max(back_to, step - batches) + 1, step + 1))
    breaks = np.flatnonzero(np.diff(taken) > 1)
    return int(taken[breaks[-1] + 1 if len(breaks) else 0]), int(taken[-1]) + 1
