"""AdamW and its state in a form that can be saved before the first step and resharded."""

from __future__ import annotations

from typing import Any

import torch

from tidewheel.train.config import OptimizerConfig
from tidewheel.train.parallel import ParallelModel

MOMENTS = ("exp_avg", "exp_avg_sq")


def build(model: ParallelModel, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, its moments allocated at zero.

    The foreach variant, not the fused one: on CPU the fused kernel rounds the tail of a vector differently from its
    body, so results would depend on how parameters are sharded.
    """
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("embedding.")]
    chosen = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon,
                                  foreach=True)
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tensors of a checkpoint: {"model": {name: parameter}, "optimizer": {"name.exp_avg": moment, ...}}."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {f"{name}.{moment}": optimizer.state[parameter][moment]
               for name, parameter in model.named_parameters() for moment in MOMENTS}
    return {"model": weights, "optimizer": moments}


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Tell AdamW how many steps its moments have seen (for the bias correction), after a restore."""
    for values in optimizer.state.values():
        values["step"].fill_(float(steps))
