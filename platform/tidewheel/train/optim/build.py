"""From configuration to optimizer: which parameters decay, which rule updates them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from tidewheel.train.optim.adafactor import Adafactor
from tidewheel.train.optim.config import OptimizerConfig
from tidewheel.train.optim.lion import Lion
from tidewheel.train.optim.master import MasterWeights
from tidewheel.train.optim.muon import Muon
from tidewheel.train.optim.optimizer import Named, Optimizer, Stored, as_it_is


class HasParameters(Protocol):
    """A module, or a model in pieces."""

    def named_parameters(self) -> Iterable[Any]:
        """(name, parameter), names as in the whole model."""


def build_optimizer(model: HasParameters, config: OptimizerConfig) -> Optimizer:
    """The optimizer of the parameters of `model`, its state allocated at zero; with fp32 master weights of those that
    are not fp32 themselves."""
    named: list[Named] = list(model.named_parameters())
    if any(parameter.dtype != torch.float32 for _, parameter in named):
        return MasterWeights(named, config)
    return Optimizer(named, *build_parts(named, config))


def build_parts(named: Sequence[Named], config: OptimizerConfig) -> tuple[list[torch.optim.Optimizer], Stored]:
    """The torch optimizers that share out fp32 parameters, and how a checkpoint stores their state."""
    if config.kind == "muon":
        hidden = [(name, parameter) for name, parameter in named if name.startswith("blocks.") and parameter.ndim == 2]
        chosen = {id(parameter) for _, parameter in hidden}
        others = [(name, parameter) for name, parameter in named if id(parameter) not in chosen]
        return [_muon(hidden, config)] * bool(hidden) + [_adamw(others, config)] * bool(others), as_it_is
    if config.kind == "adamw8bit":
        from tidewheel.train.optim import adamw8bit

        optimizer = adamw8bit.AdamW8bit(_groups(named, config), lr=config.learning_rate, betas=config.betas,
                                        eps=config.epsilon)
        optimizer.prepare()
        return [optimizer], adamw8bit.stored
    return [KINDS[config.kind](named, config)], as_it_is


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices that are not a look-up table; not to norms and biases."""
    return parameter.ndim > 1 and not name.startswith("embedding.")


def training_state(model: HasParameters, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint: {"model": {name: parameter}, "optimizer": see `Optimizer.tensors`}."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"model": weights, "optimizer": optimizer.tensors()}


def _groups(named: Iterable[Named], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups that share their weight decay and their device mesh: list operations take one mesh at a time."""
    groups: dict[tuple[float, Any], list[torch.Tensor]] = defaultdict(list)
    for name, parameter in named:
        decay = config.weight_decay if decays(name, parameter) else 0.0
        groups[decay, parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()]


def _adamw(named: Sequence[Named], config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW, fused on CUDA.

    On CPU the foreach variant: the fused kernel rounds the tail of a vector differently from its body there, so results
    would depend on how parameters are sharded.
    """
    fused = all(parameter.is_cuda for _, parameter in named)
    optimizer = torch.optim.AdamW(_groups(named, config), lr=config.learning_rate, betas=config.betas,
                                  eps=config.epsilon, foreach=not fused, fused=fused)
    for _, parameter in named:
        device = parameter.device if fused else torch.device("cpu")
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    return optimizer


def _adafactor(named: Sequence[Named], config: OptimizerConfig) -> torch.optim.Optimizer:
    optimizer = Adafactor(_groups(named, config), lr=config.learning_rate)
    optimizer.prepare()
    return optimizer


def _lion(named: Sequence[Named], config: OptimizerConfig) -> torch.optim.Optimizer:
    optimizer = Lion(_groups(named, config), lr=config.learning_rate, betas=config.betas)
    for _, parameter in named:
        optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
    return optimizer


def _muon(named: Sequence[Named], config: OptimizerConfig) -> torch.optim.Optimizer:
    """With the step scaled so that its size is AdamW's: one learning rate serves both (2502.16982, section 2.2)."""
    optimizer = Muon(_groups(named, config), lr=config.learning_rate, momentum=config.momentum,
                     adjust_lr_fn="match_rms_adamw")
    for _, parameter in named:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


KINDS: dict[str, Callable[[Sequence[Named], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw, "adafactor": _adafactor, "lion": _lion}
