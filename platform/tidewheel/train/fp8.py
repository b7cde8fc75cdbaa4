"""The blocks' linear layers in fp8, by torchao: which layers, with which scales, and gathered in which type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tidewheel.train.fp8_config import Fp8Config

if TYPE_CHECKING:
    from collections.abc import Callable

FP8_MULTIPLE = 16
"""Both sides of a matrix must be multiples of this for the fp8 kernels."""


def convert_linears(model: nn.Module, settings: Fp8Config, *, sharded: bool, tensor: int = 1) -> None:
    """Make the blocks' linear layers compute in fp8, in place, before sharding.

    The output projection stays bf16: its products feed the loss.

    Args:
        model: a decoder or a pipeline stage.
        settings: the recipe, and which layers.
        sharded: FSDP2 will shard the model, so `settings.all_gather` applies.
        tensor: tensor-parallel ranks that will share each matrix.
    """
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(settings.recipe), emulate=settings.emulate,
        enable_fsdp_float8_all_gather=settings.all_gather and sharded)
    convert_to_float8_training(model, config=config, module_filter_fn=_layers(settings, tensor))


def _layers(settings: Fp8Config, tensor: int) -> Callable[[nn.Module, str], bool]:
    """Return whether a module is to compute in fp8, as a function of the module and its name."""
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    is_worthwhile = _auto_filter_for_recipe(settings.recipe, filter_fqns=[])

    def chosen(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or not name.startswith("blocks."):
            return False
        multiple = FP8_MULTIPLE * tensor  # of a rank's part, whichever side is shared
        if module.in_features % multiple or module.out_features % multiple:
            return False
        return settings.layers == "all" or bool(is_worthwhile(module, name))

    return chosen


def gathers_in_fp8(model: nn.Module) -> bool:
    """Return whether FSDP2 gathers some of the model's weights in fp8."""
    return any(getattr(getattr(module, "config", None), "enable_fsdp_float8_all_gather", False)
               for module in model.modules())


def update_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in fp8, with one all-reduce. Call it after each update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
