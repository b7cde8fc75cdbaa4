"""Builds the optimizer of a whole model from an optimizer's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from tidewheel.errors import ConfigError
from tidewheel.parts import calling, name_of
from tidewheel.train.optim.base import Named, Optimizer
from tidewheel.train.optim.master import MasterWeights
from tidewheel.train.optim.model_optimizer import ModelOptimizer


class HasParameters(Protocol):
    """A module, or a model in pieces."""

    def named_parameters(self) -> Iterable[Any]:
        """Yield (name in the whole model, parameter)."""

    def named_buffers(self) -> Iterable[Any]:
        """Yield (name in the whole model, tensor) of what a checkpoint holds besides parameters."""


def build_optimizer(model: HasParameters, config: Optimizer) -> ModelOptimizer:
    """Return the optimizer of a model's parameters, with its state allocated at zero.

    Parameters that are not fp32 get fp32 master weights.

    Args:
        model: whose parameters are updated.
        config: the optimizer part.

    Raises:
        ConfigError: `config` omits a parameter, updates one twice, or its code failed.
    """
    named: list[Named] = list(model.named_parameters())
    with calling(config):
        if any(parameter.dtype != torch.float32 for _, parameter in named):
            optimizer: ModelOptimizer = MasterWeights(named, config)
        else:
            optimizer = ModelOptimizer(named, config.build_all(named), config.stored)
    _check_complete(optimizer.named, optimizer.parts, config)
    return optimizer


def training_state(model: HasParameters, optimizer: ModelOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of a checkpoint: {"model": `model_state`, "optimizer": `ModelOptimizer.tensors`}."""
    return {"model": model_state(model), "optimizer": optimizer.tensors()}


def model_state(model: HasParameters) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of a model's trained parameters and what goes with them, which share its memory."""
    kept = {**dict(model.named_parameters()), **getattr(model, "constants", dict)()}
    parameters = {name: parameter.detach() for name, parameter in kept.items()}
    return {**parameters, **dict(model.named_buffers())}


def _check_complete(named: Sequence[Named], parts: Sequence[torch.optim.Optimizer], config: Optimizer) -> None:
    """Raise ConfigError unless every parameter belongs to exactly one of the optimizers."""
    kind = name_of(type(config))
    held = [id(parameter) for part in parts for group in part.param_groups for parameter in group["params"]]
    for name, parameter in named:
        count = held.count(id(parameter))
        if count != 1:
            raise ConfigError(f"the optimizer {kind} updates {name} {count} times", where="optimizer.kind",
                              fix="give each parameter to one of the torch optimizers that build_all returns")
