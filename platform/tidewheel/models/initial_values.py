"""Initial values of parameters. Each value depends on seed, name, shape and index alone: all layouts draw the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from tidewheel.models.family import Model
from tidewheel.models.random_jump import normal_values


def init_parameter(name: str, shape: Sequence[int], config: Model, seed: int) -> torch.Tensor:
    """Return the initial value of one whole parameter, fp32 on CPU.

    Norm weights are `config.NORM_WEIGHT`, 1 as a rule; biases and a value head are 0. Matrices are normal with standard
    deviation `config.weight_std`. As in GPT-2, that of projections into the residual stream is divided by sqrt(2
    num_layers), so its variance does not grow with depth.

    Args:
        name: name in the whole model, "blocks.0.attention.wq.weight".
        shape: of the whole parameter.
        config: the model family's settings.
        seed: of the run.
    """
    return init_rows(name, shape, config, seed, range(shape[0]))


def init_rows(name: str, shape: Sequence[int], config: Model, seed: int, rows: range) -> torch.Tensor:
    """Return neighbouring rows of the initial value of a parameter. No other rows are drawn.

    Args:
        name: name in the whole model.
        shape: of the whole parameter.
        config: the model family's settings.
        seed: of the run.
        rows: indices of the rows in the whole parameter.
    """
    part = (len(rows), *shape[1:])
    if name.endswith("norm.weight"):
        return torch.full(part, config.NORM_WEIGHT)
    if name.endswith((".bias", "_bias")) or name.startswith("value_head."):
        return torch.zeros(part)
    std = config.weight_std
    if name.endswith(config.RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * config.num_layers)
    return normal_rows(name, shape, seed, rows, std)


def normal_rows(name: str, shape: Sequence[int], seed: int, rows: range, std: float) -> torch.Tensor:
    """Return neighbouring rows of a parameter with normal values of mean 0, fp32 on CPU.

    Args:
        name: name in the whole model.
        shape: of the whole parameter.
        seed: of the run.
        rows: indices of the rows in the whole parameter.
        std: standard deviation.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    width = math.prod(shape[1:])
    values = normal_values(int.from_bytes(digest[:8], "little") >> 1, shape[0] * width, rows.start * width,
                           rows.stop * width, std)
    return values.view(len(rows), *shape[1:])
