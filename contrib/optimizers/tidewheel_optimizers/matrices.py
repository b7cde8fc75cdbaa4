"""The base of optimizers that treat the matrices of blocks as matrices, and all other parameters as AdamW does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tidewheel as tw
from tidewheel_optimizers.sharded import part, whole


class MatrixRule(torch.optim.Optimizer):
    """Base of rules for whole matrices.

    Every rank gathers the gradient of a matrix, computes the same update of the whole matrix and takes its own part.
    The state with a side's length in both dimensions is whole on every rank. Its expensive functions are computed by
    one rank for each matrix, in turn, which sends the result to the others.

    Args:
        groups: parameter groups of matrices.
        settings: settings of the rule by name.
    """

    SIDES: ClassVar[tuple[str, str]] = ("left", "right")

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, {**settings, "weight_decay": 0.0})

    def allocate(self, like_sides: Sequence[str]) -> MatrixRule:
        """Allocate the state, zero: two moments, and two square matrices for each name; return the rule."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = torch.zeros(())
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter)
                for name in like_sides:
                    for side, length in zip(self.SIDES, parameter.shape):
                        state[f"{side}{name}"] = torch.zeros(length, length, device=parameter.device)
        return self

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the matrices that have a gradient."""
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] += 1
                update = self.update(parameter, whole(parameter.grad), state, group, number)
                number += 1
                if update is None:
                    continue
                weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(part(update, parameter), alpha=-group["lr"])

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor],
               group: dict[str, Any], number: int) -> torch.Tensor | None:
        """Return the update of a whole matrix before the learning rate, or None for none, and change its state.

        Args:
            parameter: the matrix, which may be sharded.
            gradient: whole, [m, n].
            state: of the matrix.
            group: settings.
            number: of the matrix, the same on all ranks.
        """
        raise NotImplementedError


def moment(state: torch.Tensor, value: torch.Tensor, decay: float) -> torch.Tensor:
    """Update a moment that is placed like its parameter with a whole value, and return the whole moment."""
    here = state.to_local() if isinstance(state, DTensor) else state
    here.lerp_(part(value, state), 1 - decay)
    return whole(state)


def by_one_rank(parameter: torch.Tensor, number: int, results: Sequence[torch.Tensor], compute: Any) -> None:
    """Fill `results` with what `compute()` returns on one of the ranks that share a matrix.

    Args:
        parameter: the matrix.
        number: of the matrix; ranks take turns.
        results: whole tensors on every rank.
        compute: returns as many tensors.
    """
    dimension = next((index for index, placement in enumerate(parameter.placements) if not placement.is_replicate()),
                     None) if isinstance(parameter, DTensor) else None
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    if mesh is None or dimension is None or mesh.size(dimension) == 1:
        for result, value in zip(results, compute()):
            result.copy_(value)
        return
    owner = number % mesh.size(dimension)
    if mesh.get_local_rank(dimension) == owner:
        for result, value in zip(results, compute()):
            result.copy_(value)
    for result in results:
        sent = result.to(mesh.device_type)  # offloaded: the ranks exchange what is on their GPUs
        dist.broadcast(sent, group=mesh.get_group(dimension), group_src=owner)
        if sent is not result:
            result.copy_(sent)


class OfMatrices(tw.optimizers.AdamW):
    """Base of the parts: a rule for the matrices of blocks, AdamW for embedding, output, norms and experts."""

    RULE: ClassVar[type[MatrixRule]]
    LIKE_SIDES: ClassVar[tuple[str, ...]]
    """Names of the square state matrices of each side."""
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = "gathers matrices from all workers in an update"

    def rule_settings(self) -> dict[str, Any]:
        """Return the settings of the rule by name."""
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.epsilon}

    def build_all(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[torch.optim.Optimizer]:
        others = ("_bias", ".router.weight")
        matrices = [(name, value) for name, value in named
                    if name.startswith("blocks.") and value.ndim == 2 and not name.endswith(others)]
        ids = {id(value) for _, value in matrices}
        built = super().build_all([(name, value) for name, value in named if id(value) not in ids])
        if matrices:
            groups = [{"params": [value for _, value in matrices], "weight_decay": self.weight_decay}]
            built.insert(0, self.RULE(groups, **self.rule_settings()).allocate(self.LIKE_SIDES))
        return built

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        """Return the bytes of the state, as if matrices were square; those of other shapes take more.

        The square matrices are whole on every rank, however parameters are sharded.

        Args:
            parameters: number of parameters.
            block_matrices: number of them in the matrices of blocks.
        """
        return 8.0 * parameters + 8.0 * len(self.LIKE_SIDES) * block_matrices
