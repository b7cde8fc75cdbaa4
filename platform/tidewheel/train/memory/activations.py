"""Activation checkpointing of a decoder's blocks, by torch's own means.

A block's `forward` is replaced (of a part of a block, its class) rather than the module wrapped: parameters keep their
names, and FSDP's hooks stay outside, so that weights are gathered once for recomputation and backward.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tidewheel.errors import ConfigError
from tidewheel.models import attention_operator
from tidewheel.models.attention import document_mask
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.models.moe.experts import Experts
from tidewheel.models.rope import rope_table
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.memory.kept_inputs import BlockInputs, Store

aten = torch.ops.aten
_BLOCK = re.compile(r"(^|\.)blocks\.\d+$")
PARTS = {"attention": "attention", "feed_forward": "ffn"}
"""The module of a block that a kind of checkpointing recomputes."""
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten._scaled_mm.default, aten._grouped_mm.default}
"""Matrix products with weights, in bf16, fp32 and fp8, and of experts."""
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_fused_attention_overrideable.default, torch.ops.higher_order.flex_attention,
    aten.bmm.default}
"""Attention by each kernel that torch always has; on a CPU it is batched products."""
NAMED_ATTENTION = ("torch_attn::_varlen_attn", attention_operator.NAME)
"""The same by their names, which exist once the kernel was imported: varlen, blockwise and ring."""
COLLECTIVES = {torch.ops._c10d_functional.reduce_scatter_tensor.default,
               torch.ops._c10d_functional.all_gather_into_tensor.default}
"""Collectives, which are not repeated."""
WITH_PRODUCTS = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter")
"""Collectives that overlap with products. They are operators once they were imported."""


def checkpoint_blocks(model: Decoder, config: MemoryConfig) -> None:
    """Replace `forward` of a model's blocks, or of a part of each, with one that checkpoints activations.

    Args:
        model: a decoder, or a pipeline stage's part of one.
        config: the kind of checkpointing; not none.

    Raises:
        ConfigError: the blocks have no such part, or no linear layer of a name in `keep_products`.
    """
    kind = config.activation_checkpointing
    blocks = [(int(name.rpartition(".")[2]), block) for name, block in model.named_modules() if _BLOCK.search(name)]
    names: dict[int, tuple[str, ...]] = {index: () for index, _ in blocks}
    if kind == "selective" and config.keep_products:
        names = {index: product_names(model.config, index) for index, _ in blocks}
        _check_names(config, tuple(dict.fromkeys(name for of_block in names.values() for name in of_block)))
    for index, block in blocks:  # the index in the whole model, also in a pipeline stage
        if config.keeps_block(index, model.config.num_layers):
            continue
        if kind in PARTS:
            part = _part(block, PARTS[kind])
            part.__class__ = _recomputed(type(part))  # type: ignore[arg-type]
            continue
        contexts = partial(_selective, config, names[index]) if kind == "selective" else None
        again = partial(_checkpointed, block.forward, contexts)
        block.forward = again  # type: ignore[method-assign]


def _part(block: nn.Module, name: str) -> nn.Module:
    part = getattr(block, name, None)
    if not isinstance(part, nn.Module):
        raise ConfigError(f"the model family's block has no module {name!r}", where="memory.activation_checkpointing",
                          fix="set memory.activation_checkpointing=full, or name the module so")
    return part


@functools.cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module's class whose forward pass is recomputed.

    A new `forward` for each module, as blocks get, would be compiled again for every block: the code that the compiler
    shares between blocks depends on the classes of the modules inside.
    """
    class Recomputed(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor, *shared: Any) -> torch.Tensor:
            return _checkpointed(super().forward, None, x, *shared)

    Recomputed.__name__ = Recomputed.__qualname__ = kind.__name__
    return Recomputed


def _check_names(config: MemoryConfig, names: Sequence[str]) -> None:
    for kept in config.keep_products:
        if not any(name == kept or name.endswith(f".{kept}") for name in names):
            raise ConfigError(f"a block has no linear layer {kept!r}; it has {', '.join(names)}",
                              where="memory.keep_products", fix="name layers that it has")


def product_names(model: Model, layer: int = 0) -> tuple[str, ...]:
    """Return the names of a block's linear layers and experts, in the order in which it computes their products.

    Args:
        model: the model family's settings; a block of it runs on the meta device.
        layer: index of the block.
    """
    names: list[str] = []
    with torch.device("meta"), torch.no_grad():
        block = model.block(layer)
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *_, name=name: names.append(name))
            elif isinstance(module, Experts):
                module.register_forward_hook(lambda *_, name=name: names.extend(
                    f"{name}.{matrix}" for matrix in ("w1", "w3", "w2")))
        positions = torch.zeros(1, 2, dtype=torch.int64)
        rope = model.rope(layer)
        table = None if rope is None else rope_table(positions, rope)
        block(torch.zeros(1, 2, model.dim), table, document_mask(positions))
    return tuple(names)


def _checkpointed(forward: Callable[..., torch.Tensor], contexts: Callable[[], Any] | None, x: torch.Tensor,
                  *shared: Any) -> torch.Tensor:
    """Return `forward(x, *shared)`. All blocks share the rope table and the mask, so only x costs memory."""
    if not torch.is_grad_enabled():
        return forward(x, *shared)
    extra: dict[str, Any] = {"context_fn": contexts} if contexts is not None else {}
    # no dropout: there is no random state to keep
    return checkpoint(forward, x, *shared, use_reentrant=False, preserve_rng_state=False, **extra)


def move_inputs(model: Decoder, store: Store) -> None:
    """Keep the inputs of a decoder's blocks in a store between the passes; after compilation and before FSDP.

    Args:
        model: a decoder with checkpointed blocks, or a pipeline stage's part of one.
        store: where the inputs go.
    """
    inputs = BlockInputs(store)
    for name, block in model.named_modules():
        if _BLOCK.search(name):
            index = int(name.rpartition(".")[2])
            block.forward = inputs.of_block(block.forward, index)  # type: ignore[method-assign]


def _selective(config: MemoryConfig, names: Sequence[str]) -> Any:
    """Return the two contexts of a checkpointed block, which count its matrix products in each pass.

    Args:
        config: which products to keep.
        names: `product_names`; empty if the numbers decide.
    """
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        named = operator.name() in NAMED_ATTENTION + WITH_PRODUCTS
        save = operator in ATTENTION or operator in COLLECTIVES or named
        if operator in PRODUCTS:
            seen[context.is_recompute] += 1
            number = seen[context.is_recompute]
            # experts in reproducible mode have a product for each group, more than names; on a CPU none is counted
            save = config.keeps_product(number, names[number - 1] if number <= len(names) else "")
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
