"""The base of the modules that adapters add."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from tidewheel.models.adapting.experts import StackedLinear

if TYPE_CHECKING:
    from tidewheel.models.adapter import Adapter, Place

Cuts = dict[int, dict[str, int]]


class Added(nn.Module):
    """What an adapter adds to one module: parameters of `Adapter.shapes`, uninitialised, on the module's device.

    Args:
        adapter: the settings.
        name: of the module in the whole model.
        module: to adapt.
    """

    CUTS: ClassVar[Cuts] = {}
    """{dimension of the module's matrix [O, I] that tensor parallelism cuts: {parameter: its dimension, cut too}}."""
    CAN_UNMERGE: ClassVar[bool] = True
    """Whether the module's matrix follows from the merged one."""
    CHANGES_BIAS: ClassVar[bool] = False
    """Whether `merged` and `unmerged` also take the module's bias [O]."""

    def __init__(self, adapter: Adapter, name: str, module: nn.Module) -> None:
        super().__init__()
        stack, inputs, outputs = sizes(module, adapter.PLACE)
        device = (module.weight if isinstance(module, StackedLinear) else next(module.parameters())).device
        for key, shape in adapter.shapes(name, inputs, outputs).items():
            value = torch.empty(*stack, *shape, device=device)
            self.register_parameter(key, nn.Parameter(value, requires_grad=f".{key}" not in adapter.CONSTANT))


def sizes(module: nn.Module, place: Place) -> tuple[tuple[int, ...], int, int]:
    """Return the number of matrices of a stack, as a tuple, and the widths that `Adapter.shapes` takes.

    Args:
        module: to adapt.
        place: what kind of module it is.
    """
    if isinstance(module, StackedLinear):
        experts, outputs, inputs = module.weight.shape
        return (experts,), inputs, outputs
    if isinstance(module, nn.Embedding):
        return (), module.num_embeddings, module.embedding_dim
    if place == "output":
        widths = [layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear)]
        if not widths:  # experts alone
            widths = [weight.shape[-1] for weight in module.parameters() if weight.ndim > 1]
        return (), widths[0], widths[0]
    linear = module.get_submodule("wk") if place == "attention" else module
    assert isinstance(linear, nn.Linear)
    return (), linear.in_features, linear.out_features
