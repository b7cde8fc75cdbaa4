"""FSDP2's reduction of gradients in reproducible mode, in place of its reduce-scatter.

It is called after the backward pass of each micro-batch. What FSDP2 makes of it before the last micro-batch is not
used; `FullyShard.begin` resets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tidewheel.train.parallel.expert import ShardedExperts
from tidewheel.train.reproducible.exchange import OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder


class OrderedReduceScatter(ReduceScatter):
    """Sum of a unit's gradients over ranks and micro-batches in the canonical order.

    Args:
        order: knows the current micro-batch.
        total: of the unit.
        others: returns the flat gradients of the sources after the first, whose weights this rank holds.
    """

    def __init__(self, order: GradientOrder, total: OrderedSum,
                 others: Callable[[], Sequence[torch.Tensor]] = tuple) -> None:
        self._order, self._total, self._others = order, total, others

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._total.add(input_tensor, *self._others())
        if self._order.last:
            output_tensor.copy_(self._total.shard())

    def alone(self, gradient: torch.Tensor) -> None:
        """Add a gradient that FSDP2 has no other rank to reduce with, and write the sum over it.

        FSDP2 calls no reduce-scatter on a single rank, but its hook for an all-reduce. The sum may keep the gradient's
        memory, to which nobody else writes.
        """
        self(gradient, gradient)


def reduce_by_source(unit: FSDPModule, order: GradientOrder, experts: ShardedExperts) -> None:
    """Let FSDP2 reduce the gradients of a layer's experts, which are apart for each source.

    Args:
        unit: the experts.
        order: knows the current micro-batch.
        experts: how experts are sharded.
    """
    assert experts.sums is not None
    by_source: Any = unit.arithmetic  # type: ignore[attr-defined]
    ranks = experts.mesh.size()
    reduce = OrderedReduceScatter(order, experts.sums(), lambda: _others(unit, by_source, ranks, experts.sources))
    if ranks > 1:
        unit.set_custom_reduce_scatter(reduce)
    else:
        unit.set_all_reduce_hook(reduce.alone)


def _others(unit: FSDPModule, by_source: Any, ranks: int, sources: int) -> list[torch.Tensor]:
    """Return the gradients of each source after the first in the layout that FSDP2 gives to a reduce-scatter.

    Args:
        unit: the experts.
        by_source: has the gradients of their weights.
        ranks: number of ranks over which FSDP2 shards them.
        sources: number of sources.
    """
    flats: list[list[torch.Tensor]] = [[] for _ in range(sources - 1)]
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params:
        gradients = by_source.take(parameter._module_info.param_name)
        assert len(gradients) == sources - 1, f"{len(gradients)} gradients of {sources - 1} other sources"
        for flat, gradient in zip(flats, gradients):
            flat.append(_by_rank(gradient.float(), parameter.fsdp_placement.dim, ranks))
    return [torch.cat(flat, dim=1).flatten() for flat in flats]


def _by_rank(gradient: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Return each rank's shard of a gradient, padded to one size: [ranks, n].

    Args:
        gradient: of the gathered parameter.
        dim: that FSDP2 shards.
        ranks: number of shards.
    """
    if dim:
        gradient = torch.cat(gradient.chunk(ranks, dim=dim))
    rows = gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None]
    missing = -len(rows) % ranks
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).reshape(ranks, -1)
