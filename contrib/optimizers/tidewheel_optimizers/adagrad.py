"""Adagrad of torch."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

import tidewheel as tw


class Adagrad(tw.Optimizer):
    """Adagrad (https://jmlr.org/papers/v12/duchi11a.html), `torch.optim.Adagrad`: steps shrink with the sum of squared
    gradients. Its weight decay is added to the gradient (L2)."""

    STATE = ("step", "sum")
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""

    learning_rate: float = Field(default=1e-2, gt=0)
    """Peak learning rate."""
    epsilon: float = Field(default=1e-10, gt=0)
    """Added to the root of the sum."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Share of each matrix that is added to its gradient."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(groups, lr=self.learning_rate, eps=self.epsilon, foreach=True)
