"""Judge a step: a pure function of its all-reduced loss and norm, and of those of the steps before.

Everything is a tensor on the training device, so that the optimizer gets the judgement without a wait of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidewheel.train.guards.config import GuardsConfig

FINE, LOSS, GRADIENT, OVERFLOW, LOSS_SPIKE, GRADIENT_SPIKE = range(6)
REASONS = ("", "non-finite loss", "non-finite gradient", "overflow", "loss spike", "gradient spike")
"""Text for each code."""
DEVIATION = 1.4826
"""Standard deviations in a median absolute deviation of normal values."""
LEAST = 1e-3
"""Least deviation, as a share of the median loss and in the logarithm of the norm. Without it any change of nearly
constant values would be a jump."""


class Detector:
    """Judges each step against a window of earlier values.

    Args:
        config: thresholds and policies.
        device: device of the values.
        scaled: whether gradients are scaled (fp16). If only they are not finite, the scale was too large.
    """

    def __init__(self, config: GuardsConfig, device: torch.device, *, scaled: bool = False) -> None:
        self._config, self._scaled = config, scaled
        self._values = torch.full((2, config.window), torch.nan, dtype=torch.float64, device=device)

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Judge a step, and add its values to the window if they are finite.

        Args:
            loss: [] mean loss of the global batch.
            norm: [] norm of its gradient, before clipping.

        Returns:
            [4] fp64 on the device: code, deviation of the loss, deviation of the norm (NaN while the window holds too
            few values), and 1 to withhold the update.
        """
        config = self._config
        now = torch.stack([loss.double(), norm.double().clamp(min=1e-30).log()])
        finite = torch.stack([loss, norm]).isfinite()
        z = self._deviations(now)
        spike = z > config.z_score  # false for NaN
        code = torch.zeros_like(now[0])
        for wrong, name in ((spike[1], GRADIENT_SPIKE), (spike[0], LOSS_SPIKE),
                            (~finite[1], OVERFLOW if self._scaled else GRADIENT), (~finite[0], LOSS)):
            code = torch.where(wrong, float(name), code)  # the last match counts
        withheld = code > 0 if config.spike != "ignore" else (code > 0) & (code < LOSS_SPIKE)
        rolled = torch.cat([self._values[:, 1:], now[:, None]], dim=1)
        self._values = torch.where(finite.all(), rolled, self._values)
        return torch.stack([code, *z, withheld.double()])

    def _deviations(self, now: torch.Tensor) -> torch.Tensor:
        """Return the distances above the window's medians in deviations, [2]; NaN while it is less than half full."""
        values, window = self._values, self._config.window
        middle = _median(values)
        spread = DEVIATION * _median((values - middle[:, None]).abs())
        least = torch.stack([LEAST * middle[0].abs(), torch.full_like(middle[1], LEAST)])
        enough = values.isfinite().sum(dim=1) >= window // 2
        return torch.where(enough, (now - middle) / torch.maximum(spread, least), torch.nan)

    def state(self) -> list[list[float]]:
        """Return the window as JSON values: losses and logarithms of norms, oldest first. Waits for the device."""
        return [[value for value in row if value == value] for row in self._values.tolist()]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Restore the window of `state`, or its newest values if the window is shorter now."""
        self._values.fill_(torch.nan)
        for row, values in zip(self._values, state):
            kept = values[-self._config.window:]
            if kept:
                row[-len(kept):] = torch.tensor(kept, dtype=torch.float64)


def _median(values: torch.Tensor) -> torch.Tensor:
    """Return the medians of the rows of [n, w], [n], ignoring NaN; NaN for an empty row.

    `torch.nanmedian` takes the lower of two middle values and is not deterministic on CUDA.
    """
    ordered = values.sort(dim=1).values  # NaN last
    count = values.isnan().logical_not().sum(dim=1, keepdim=True)
    lower, upper = (count - 1).clamp(min=0) // 2, (count // 2).clamp(max=values.shape[1] - 1)
    return ((ordered.gather(1, lower) + ordered.gather(1, upper)) / 2)[:, 0]
