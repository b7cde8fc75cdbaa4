"""Tensor parallelism with sequence parallelism, by torch's parallel styles.

Queries, keys, values and the input matrices of a feed-forward are sharded by columns, matrices that write to the
residual stream by rows, as the model family declares (Megatron-LM, https://arxiv.org/abs/1909.08053). Between them, the
residual stream and the norms are sharded by positions (sequence parallelism, https://arxiv.org/abs/2205.05198): an
all-gather before and a reduce-scatter after each half of a block replace an all-reduce. `tensor_products.py` has the
products beside these collectives, and the vocabulary is sharded in `vocabulary.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tidewheel.errors import ConfigError
from tidewheel.models.blocks.norms import WidthNorm
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Cut
from tidewheel.models.loss import soft_capped
from tidewheel.models.moe.layer import MoE
from tidewheel.models.products import Products
from tidewheel.train.parallel.tensor_products import AsynchronousRows, ColumnProducts
from tidewheel.train.parallel.vocabulary import VocabularyEmbedding, VocabularyLoss, shard_rows, whole_logits


def apply(model: Decoder, mesh: DeviceMesh, *, asynchronous: bool = False) -> None:
    """Shard the parameters of a decoder on the meta device.

    All become DTensors on the mesh; those of norms are replicated. A pipeline stage without embedding or output takes
    and returns the residual stream sharded by positions, [B, L/T, D].

    Args:
        model: a decoder or a pipeline stage.
        mesh: one-dimensional, the T ranks of the tensor-parallel group.
        asynchronous: overlap collectives with the products beside them (`async_tensor.check` says whether it works).

    Raises:
        ConfigError: the model family names a module that its block does not have.
    """
    for layer, block in model.layers():
        cuts = model.config.tensor_parallel(layer)
        plan = _block_plan(block, cuts, asynchronous)
        for name in _product_modules(block, cuts):
            module: Any = block.get_submodule(name)
            module.products = ColumnProducts(module.products.fused, mesh.get_group().group_name, mesh.size(),
                                             asynchronous)
            del plan[name]
        parallelize_module(block, mesh, plan)
    if model.embedding is not None:
        model.register_module("embedding", VocabularyEmbedding(model.embedding, mesh))
    if model.norm is not None:
        parallelize_module(model, mesh, {"norm": SequenceParallel()})
        model.register_module("token_loss", VocabularyLoss(model.token_loss, mesh))
        model.logits = functools.partial(_logits, model, mesh)  # type: ignore[method-assign]
    if model.output is not None:
        model.output.weight = shard_rows(model.output.weight, mesh)


def _product_modules(block: nn.Module, cuts: Mapping[str, Cut]) -> list[str]:
    """Return the modules whose `products` gather their input. Others take the whole input.

    Layers of another class (fp8) convert their input themselves, and compute on DTensors.
    """
    names = []
    for name, cut in cuts.items():
        if cut != "gathered" or not isinstance(getattr(block.get_submodule(name), "products", None), Products):
            continue
        layers = [block.get_submodule(inner) for inner, how in cuts.items()
                  if how == "columns" and inner.startswith(f"{name}.")]
        if all(type(layer) is nn.Linear for layer in layers):
            names.append(name)
    return names


def _block_plan(block: nn.Module, cuts: Mapping[str, Cut], asynchronous: bool = False) -> dict[str, ParallelStyle]:
    """Return {module: style}. Between modules, x [B, L/T, D] has this rank's positions."""
    plan: dict[str, ParallelStyle] = {}
    for name, cut in cuts.items():
        try:
            module = block.get_submodule(name)
        except AttributeError:
            raise ConfigError(f"tensor_parallel() names {name!r}, which a block does not have", where="model.kind",
                              fix="name the modules as the block's attributes") from None
        if cut == "gathered":
            unsharded = (None,) * (len(inspect.signature(module.forward).parameters) - 1)  # of attention: rope, mask
            plan[name] = PrepareModuleInput(input_layouts=(Shard(1), *unsharded),
                                            desired_input_layouts=(Replicate(), *unsharded))
        elif cut == "columns":
            plan[name] = ColwiseParallel()
        elif cut == "rows" and asynchronous:
            plan[name] = AsynchronousRows()
        elif cut == "rows":
            plan[name] = RowwiseParallel(output_layouts=Shard(1))
        elif cut == "positions":
            plan[name] = SequenceParallel()
        elif cut == "added":
            plan[name] = SequenceParallel(use_local_output=True)
        elif cut == "whole":
            plan[name] = _Replicated()
        elif cut == "experts":
            plan[name] = _ShardedExperts()
        elif cut in ("width", "per_head"):
            plan[name] = _ShardedValues()
        else:  # [B, H/T, L, E] is sharded by heads, which a norm treats like positions
            plan[name] = SequenceParallel(use_local_output=True)
    return plan


class _ShardedValues(ParallelStyle):
    """Shard a module's vectors, which have values for each head, like the heads. Its input is this rank's part."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, shard_rows(parameter, mesh))
        if isinstance(module, WidthNorm):
            module.group = mesh.get_group()
        return module


class _Replicated(ParallelStyle):
    """Make a module's parameters replicated DTensors, so that the parts of their gradients are added up."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole))
        return module


class _ShardedExperts(PrepareModuleInput):
    """Shard a mixture of experts by the inner width of each expert; every rank routes the tokens of all positions."""

    def __init__(self) -> None:
        super().__init__(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MoE)
        experts = module.experts
        inner = {"w1": 1, "w3": 1, "w2": 2, "w1_bias": 1, "w3_bias": 1}
        for holder in (experts, module.router):
            for name, parameter in list(holder.named_parameters(recurse=False)):
                placement = Shard(inner[name]) if name in inner else Replicate()
                sharded = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                holder.register_parameter(name, nn.Parameter(sharded))
        experts.output_bias_share = 1.0 if mesh.get_local_rank() == 0 else 0.0
        module.reduce = functools.partial(_sum_of_parts, mesh)
        return super()._apply(module, mesh)


def _sum_of_parts(mesh: DeviceMesh, part_BLD: torch.Tensor) -> torch.Tensor:
    """Return this rank's positions [B, L/T, D] of the sum over ranks."""
    part = DTensor.from_local(part_BLD, mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[Shard(1)]).to_local()


def complete_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Sum over the group the gradients of replicated parameters.

    Each rank has a part of them, because norms see the positions or heads of one rank only. FSDP2 does this by itself
    before it reduces.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) \
                and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _logits(model: Decoder, mesh: DeviceMesh, x_BLD: torch.Tensor) -> torch.Tensor:
    """Return whole logits; replaces `Decoder.logits`."""
    return soft_capped(whole_logits(x_BLD, model.weight, mesh), model.config.logit_soft_cap)
