"""Activation checkpointing of a decoder's blocks, by torch's own means.

A block's `forward` is replaced rather than the block wrapped: parameters keep their names, and FSDP's hooks stay
outside, so that weights are gathered once for recomputation and backward.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tidewheel.train.memory.config import MemoryConfig

aten = torch.ops.aten
_BLOCK = re.compile(r"(^|\.)blocks\.\d+$")
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten._scaled_mm.default}
"""Matrix products with weights, in bf16, fp32 and fp8."""
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_fused_attention_overrideable.default, torch.ops.higher_order.flex_attention,
    aten.bmm.default}
"""Attention by each kernel but varlen, which is an operator once it was imported; on a CPU it is batched products."""
VARLEN = "torch_attn::_varlen_attn"
COLLECTIVES = {torch.ops._c10d_functional.reduce_scatter_tensor.default,
               torch.ops._c10d_functional.all_gather_into_tensor.default}
"""Collectives, which are not repeated."""


def checkpoint_blocks(model: nn.Module, config: MemoryConfig) -> None:
    """Replace `forward` of a model's blocks with one that checkpoints activations.

    Args:
        model: a decoder, or a pipeline stage's part of one.
        config: the kind of checkpointing; not none.
    """
    kind = config.activation_checkpointing
    blocks = [(name, block) for name, block in model.named_modules() if _BLOCK.search(name)]
    for name, block in blocks:
        if kind == "every_nth" and int(name.rpartition(".")[2]) % config.every:  # its number in the whole model
            continue
        contexts = partial(_selective, config.recompute_products) if kind == "selective" else None
        again = partial(_checkpointed, block.forward, contexts, kind == "offload")
        block.forward = again  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., torch.Tensor], contexts: Callable[[], Any] | None, offload: bool,
                  x: torch.Tensor, *shared: Any) -> torch.Tensor:
    """Return `forward(x, *shared)`. All blocks share the rope table and the mask, so only x costs memory."""
    if not torch.is_grad_enabled():
        return forward(x, *shared)
    extra: dict[str, Any] = {"context_fn": contexts} if contexts is not None else {}
    host = save_on_cpu(pin_memory=x.is_cuda) if offload else contextlib.nullcontext()
    with host:  # no dropout: there is no random state to keep
        return checkpoint(forward, x, *shared, use_reentrant=False, preserve_rng_state=False, **extra)


def _selective(recompute_products: int) -> Any:
    """Return the two contexts of a checkpointed block, which count its matrix products in each pass."""
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operator in ATTENTION or operator in COLLECTIVES or operator.name() == VARLEN
        if operator in PRODUCTS:
            seen[context.is_recompute] += 1
            save = not recompute_products or seen[context.is_recompute] % recompute_products != 0
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
