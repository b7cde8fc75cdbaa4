"""Initial weights of this rank's part of the model. They do not depend on the layout."""

from __future__ import annotations

import torch

from tidewheel.models.adapter import MARK
from tidewheel.models.initial_values import init_rows
from tidewheel.models.own_module import OwnModule
from tidewheel.train.parallel import adapter_weights
from tidewheel.train.parallel.initial_parts import Draw, fill
from tidewheel.train.parallel.model import ParallelModel


@torch.no_grad()
def init_weights(model: ParallelModel, seed: int) -> None:
    """Initialise every parameter, and set buffers to 0.

    Each rank draws the rows that it holds, one parameter at a time, on CPU. A module of the user's own was built with
    its initial values, from the same seed on every rank.
    """
    if isinstance(model.config, OwnModule):
        return
    if model.adapter is not None:
        init_base(model, seed)
        adapter_weights.init_adapter(model, seed)
        init_head(model, seed)
        return
    for name, parameter in model.named_parameters():
        fill(name, parameter, _draw(model, seed))
    for _, buffer in model.named_buffers():
        buffer.zero_()
    model.refresh()


def init_base(model: ParallelModel, seed: int) -> None:
    """Initialise the frozen base of an adapter alone."""
    adapter_weights.init_base(model, _draw(model, seed))


@torch.no_grad()
def init_head(model: ParallelModel, seed: int) -> None:
    """Initialise an objective's head, which is trained beside an adapter."""
    for name, parameter in model.named_parameters():
        if MARK not in name:
            fill(name, parameter, _draw(model, seed))
    model.refresh()


def _draw(model: ParallelModel, seed: int) -> Draw:
    """Return how the initial values of the model family's parameters are drawn."""
    def draw(name: str, shape: torch.Size, rows: range) -> torch.Tensor:
        return init_rows(name, shape, model.config, seed, rows)

    return draw
