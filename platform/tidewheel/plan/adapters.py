"""Memory of a run that trains an adapter: a frozen base without gradients and optimizer state, perhaps in 4 bits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tidewheel.models.adapting.counts import layer_shapes
from tidewheel.plan.held import Held
from tidewheel.plan.layout import GRADIENT_BYTES, Job, Layout, Share

if TYPE_CHECKING:
    from tidewheel.plan.memory import Memory

DECODED_BYTES = 4 + 4 + 2
"""Bytes of an entry of a matrix while it is decoded: looked up and scaled in fp32, then in the products' dtype."""
PLAIN = "plain"
"""`Adapter.base` of a base that is not quantised."""


def block_bytes(job: Job, parameters: float, tensor: int) -> float:
    """Return the bytes of a block of the base on one rank.

    Args:
        job: the run.
        parameters: of the block on this rank.
        tensor: number of tensor-parallel ranks.
    """
    adapter = job.config.adapter
    if adapter is None or adapter.base == PLAIN:
        return parameters * job.weight_bytes
    matrices = job.block_matrices / tensor
    bits = 4 + 8 / 64 + 64 / job.model.dim  # of `models/adapting/nf4.py`; wider inputs need a little less
    return matrices * bits / 8 + (parameters - matrices) * job.weight_bytes


def with_adapter(job: Job, layout: Layout, share: Share, parts: Held, whole: Memory) -> Memory:
    """Return the memory of a GPU whose base is frozen. Activations are those of a whole training, an upper bound.

    Args:
        job: the run, with an adapter.
        layout: its layout.
        share: the pipeline rank's part of the model.
        parts: its parameters.
        whole: the memory if all parameters were trained.
    """
    adapter = job.config.adapter
    assert adapter is not None
    trained = job.saved_parameters * share.blocks / job.model.num_layers / layout.parallel.tensor
    stored, largest = block_bytes(job, parts.block, layout.parallel.tensor), 0.0
    if adapter.base != PLAIN:
        largest = max(a * b for a, b in layer_shapes(job.model, 0).values()) * DECODED_BYTES
    ends = parts.ends * job.weight_bytes
    base = stored * share.blocks + ends
    optimizer = job.optimizer_bytes - job.paged_bytes
    if not layout.sharded:
        ranks = layout.data * layout.parallel.context if layout.parallel.data == "zero1" else 1
        copies = whole.copies if adapter.base == PLAIN else 0.0
        return dataclasses.replace(whole, parameters=base + 4 * trained, gradients=GRADIENT_BYTES * trained,
                                   copies=copies, optimizer=optimizer * trained / ranks,
                                   communication=4 * trained + largest)
    keeps = layout.parallel.data == "zero2"
    rows = trained / layout.shards
    gathered = stored if adapter.base != PLAIN else parts.block * job.gathered_bytes
    moving = 0.0 if keeps else gathered + max(gathered, parts.embedding * job.gathered_bytes)
    copies = base if keeps else parts.output * job.gathered_bytes
    return dataclasses.replace(
        whole, parameters=base / layout.shards + 4 * rows, copies=copies, gradients=GRADIENT_BYTES * rows,
        optimizer=optimizer * rows, communication=moving + largest + 4 * trained / max(1, share.blocks))

