"""AdamW whose gradients are of older weights, as in asynchronous training, but the same in every run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.tensor import DTensor

import tidewheel as tw
from tidewheel_optimizers import Decay
from tidewheel_optimizers.sharded import local

Named = tuple[str, torch.Tensor]
BLOCK = re.compile(r"blocks\.(\d+)\.")
"""Beginning of the names of a layer's parameters."""


class Stale(tw.Optimizer):
    """AdamW with stale gradients: experimental, to study what asynchronous training costs.

    The model holds the weights of some updates ago, the optimizer the newest ones. Each gradient is of the older
    weights and updates the newest, as when a worker is late. Nothing is faster by it: it shows the loss alone. Each
    evaluation has the loss of the newest weights too, as an average's.
    """

    STATE = ("step", "exp_avg", "exp_avg_sq", "version_0")
    AVERAGE = "version_0"
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decays of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    staleness: int = Field(default=1, ge=0, le=64)
    """Most updates that a gradient's weights are behind."""
    order: Literal["constant", "random", "pipeline"] = "constant"
    """constant: all gradients are `staleness` updates behind; with 1 as in PipeDream-2BW
    (https://arxiv.org/abs/2006.09503). random: 0 to `staleness`, drawn for each step, as without locks (Hogwild,
    https://arxiv.org/abs/1106.5730). pipeline: those of stage s of `staleness` + 1 equal stages are `staleness` - s
    behind, as in PipeDream with weight stashing (https://arxiv.org/abs/1806.03377)."""
    compensation: float = Field(default=0.0, ge=0)
    """Factor of g^2 / sqrt(v) times the weights' movement, which is added to the gradient g, with its second moment v
    (the adaptive DC-ASGD of https://arxiv.org/abs/1609.08326, section 6, where it is 2)."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Rule(groups, self.learning_rate, self.betas, self.epsilon, self.compensation)

    def build_all(self, named: Sequence[Named]) -> list[torch.optim.Optimizer]:
        optimizers: list[torch.optim.Optimizer] = []
        layers = _layers(named) if self.order == "pipeline" else 0
        for behind in range(self.staleness + 1):
            for rule in super().build_all([each for each in named if self._behind(each[0], layers) == behind]):
                assert isinstance(rule, Rule)
                rule.begin(behind, is_random=self.order == "random")
                optimizers.append(rule)
        return optimizers

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        return (12.0 + 4.0 * self.staleness) * parameters  # of a pipeline half of the versions at most

    def _behind(self, name: str, layers: int) -> int:
        """Return how many updates the gradients of a parameter are behind, in a model of so many layers."""
        if self.order != "pipeline":
            return self.staleness
        if found := BLOCK.match(name):
            return self.staleness - int(found[1]) * (self.staleness + 1) // layers
        return self.staleness if name.startswith("embedding.") else 0


def _layers(named: Sequence[Named]) -> int:
    """Return the number of the model's layers, of which a rank of a pipeline has some. All ranks call it together."""
    layers = max((1 + int(found[1]) for name, _ in named if (found := BLOCK.match(name))), default=0)
    if not dist.is_initialized():
        return layers
    first = named[0][1]
    known = torch.tensor(layers, device=first.device_mesh.device_type if isinstance(first, DTensor) else first.device)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    return int(known)


class Rule(torch.optim.Optimizer):
    """AdamW of the newest weights w_t with gradients of w_{t - d}, which the parameters hold.

        g <- g + compensation g^2 / (sqrt(v) + eps) (w_t - w_{t - d})
        w_{t + 1} = AdamW(w_t, g);   parameters <- w_{t + 1 - d'}

    Args:
        groups: parameter groups.
        lr: learning rate.
        betas: decays of the moments.
        eps: added to the root.
        compensation: see above.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float, compensation: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._compensation, self._most, self._is_random = compensation, 0, False

    def begin(self, most: int, *, is_random: bool) -> None:
        """Make room for older weights.

        Args:
            most: updates that a gradient may be behind.
            is_random: whether that is drawn for each step.
        """
        self._most, self._is_random = most, is_random
        for parameter, state in self.state.items():
            for number in range(1, most + 1):
                state[f"version_{number}"] = torch.zeros_like(parameter)

    def behind(self, updates: int) -> int:
        """Return how many updates the weights of the next gradient are behind, after some updates."""
        if self._is_random:
            drawn = int.from_bytes(hashlib.blake2b(f"stale {updates}".encode(), digest_size=8).digest(), "big")
            return min(updates, drawn % (self._most + 1))
        return min(updates, self._most)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the newest weights, and show the model those that the next gradient is of."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), rate = self.state[parameter], group["betas"], group["lr"]
        shown, gradient = local(parameter), local(parameter.grad)
        versions = [local(state[f"version_{number}"]) for number in range(self._most + 1)]
        if not state["step"]:
            for version in versions:
                version.copy_(shown)
        state["step"] += 1
        updates = int(state["step"])
        moment, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        if self._compensation:
            curvature = gradient.square() / (square.sqrt() + group["eps"])
            gradient = gradient + self._compensation * curvature * (versions[0] - shown)
        moment.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square.sqrt() / (1 - beta2**updates) ** 0.5).add_(group["eps"])
        for number in range(self._most, 0, -1):
            versions[number].copy_(versions[number - 1])
        versions[0].mul_(1 - rate * group["weight_decay"]).addcdiv_(moment, root, value=-rate / (1 - beta1**updates))
        shown.copy_(versions[self.behind(updates)])
