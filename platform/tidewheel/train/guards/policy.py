"""What is done about a bad step: counted, recorded, and the same on all ranks."""

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
    """What was found about a step, and what follows."""

    reason: str = ""
    """One of `detect.REASONS`; "": nothing is wrong."""
    action: str = "apply"
    """apply, ignore (applied all the same), skip, rollback or stop."""
    loss_z: float = math.nan
    """Deviations of the loss above the median of the window; NaN while it holds too little."""
    gradient_norm_z: float = math.nan

    @property
    def applied(self) -> bool:
        """Whether the update was made."""
        return self.action in ("apply", "ignore")


class Guard:
    """Judges every step and keeps count; its state is part of a checkpoint.

    Args:
        config: the policies.
        device: where losses and norms are.
        scaled: see `Detector`.
    """

    def __init__(self, config: GuardsConfig, device: torch.device, *, scaled: bool = False) -> None:
        self.config = config
        self._detector = Detector(config, device, scaled=scaled)
        self.skipped = 0
        """Steps without an update so far."""
        self.in_a_row = 0
        """Of those, the newest ones without a good step between; an overflow is the loss scale's affair."""

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """`Detector.judge`: to be called once for each step, on all ranks."""
        return self._detector.judge(loss, norm)

    def verdict(self, judged: Sequence[float]) -> Verdict:
        """What `judge` said, as host numbers, and what to do; counts."""
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
        """Raise ConfigError when this step ends the run."""
        if verdict.action == "stop":
            raise ConfigError(f"{verdict.reason} at step {step}", where=where, mend=_CALMER)
        if verdict.action == "skip" and self.in_a_row > self.config.max_skips:
            raise ConfigError(f"{self.in_a_row} steps in a row without an update up to step {step}: {verdict.reason}",
                              where=where, mend=_CALMER if "spike" not in verdict.reason else
                              f"raise guards.z_score ({self.config.z_score:g}) or set guards.spike=ignore if the level "
                              f"has changed for good; else {_CALMER}")

    def check_rollbacks(self, rollbacks: int, verdict: Verdict, step: int, where: str) -> None:
        """Raise ConfigError when so many rollbacks were made that one more is too many."""
        if rollbacks >= self.config.max_rollbacks:
            raise ConfigError(f"{verdict.reason} at step {step} after {rollbacks} rollbacks, "
                              f"guards.max_rollbacks is {self.config.max_rollbacks}", where=where,
                              mend=f"look at what was passed over with `tidewheel shards trace --run {where} --step "
                              f"{step}`; then raise the limit, or {_CALMER}")

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return {"window": self._detector.state(), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._detector.load(state["window"])
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])


_CALMER = ("lower optimizer.learning_rate or lengthen schedule's warm-up; the same command goes on from the last "
           "checkpoint")


def event(verdict: Verdict, step: int, taken: np.ndarray, digest: str | None, loss: float,
          norm: float) -> dict[str, Any]:
    """Detail of the event "guard": what happened, and the batch that did it. JSON has no NaN: such numbers are text."""
    return {"step": step, "reason": verdict.reason, "action": verdict.action, "loss": _number(loss),
            "gradient_norm": _number(norm), "loss_z": _z(verdict.loss_z),
            "gradient_norm_z": _z(verdict.gradient_norm_z), "position": int(taken[0]), "count": len(taken),
            "digest": digest}


def _z(value: float) -> float | str | None:
    return None if math.isnan(value) else _number(value)


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def window(positions: Positions, step: int, back_to: int, batches: int) -> Window:
    """What a rollback from `step` to the checkpoint of step `back_to` passes over: the batches of the newest `batches`
    steps, as far as they are younger than the checkpoint and lie together in the order."""
    taken = positions.of_steps(range(max(back_to, step - batches) + 1, step + 1))
    breaks = np.flatnonzero(np.diff(taken) > 1)
    return int(taken[breaks[-1] + 1 if len(breaks) else 0]), int(taken[-1]) + 1
