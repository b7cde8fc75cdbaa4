"""FSDP2's reduction of gradients in reproducible mode, in place of its reduce-scatter.

It is called after the backward pass of each micro-batch. What FSDP2 makes of it before the last micro-batch is not
used; `FullyShard.begin` resets it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
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
    """

    def __init__(self, order: GradientOrder, total: OrderedSum) -> None:
        self._order, self._total = order, total

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._add(input_tensor)
        if self._order.last:
            output_tensor.copy_(self._total.shard())

    def _add(self, flat: torch.Tensor) -> None:
        self._total.add(flat)


class _OfExperts(OrderedReduceScatter):
    """The same for a layer's experts, whose gradients are in their `BySource`.

    Args:
        order: knows the current micro-batch.
        experts: how experts are sharded.
        unit: the experts.
    """

    def __init__(self, order: GradientOrder, experts: ShardedExperts, unit: FSDPModule) -> None:
        assert experts.sums is not None
        super().__init__(order, experts.sums())
        self._ranks, self._unit, self._by_source = experts.mesh.size(), unit, cast(Any, unit).arithmetic
        self._by_source.new_sum = self._total.partial

    def alone(self, gradient: torch.Tensor) -> None:
        """Write the sum over a gradient that FSDP2 has no other rank to reduce with.

        FSDP2 calls no reduce-scatter on a single rank, but its hook for an all-reduce.
        """
        self(gradient, gradient)

    def _add(self, flat: torch.Tensor) -> None:
        if not (self._order.last or self._total.swaps):
            return
        group: Any = self._unit._get_fsdp_state()._fsdp_param_group
        parameters = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        taken = [self._by_source.take(parameter._module_info.param_name) for parameter in parameters]
        dims = [parameter.fsdp_placement.dim for parameter in parameters]
        flats = {nodes[0][0]: _flat([gradients for _, gradients in nodes], dims, self._ranks)
                 for nodes in zip(*taken, strict=True)}
        if self._total.swaps:
            self._total.add(*flats.values())
        else:
            for node, values in flats.items():
                self._total.put(node, values)


def reduce_by_source(unit: FSDPModule, order: GradientOrder, experts: ShardedExperts) -> None:
    """Let FSDP2 reduce the gradients of a layer's experts, which are apart for each source.

    Args:
        unit: the experts.
        order: knows the current micro-batch.
        experts: how experts are sharded.
    """
    reduce = _OfExperts(order, experts, unit)
    if experts.mesh.size() > 1:
        unit.set_custom_reduce_scatter(reduce)
    else:
        unit.set_all_reduce_hook(reduce.alone)


def _flat(gradients: Sequence[list[torch.Tensor]], dims: Sequence[int], ranks: int) -> torch.Tensor:
    """Return gradients in the layout that FSDP2 gives to a reduce-scatter: all shards of one rank, then of the next.

    Args:
        gradients: of each expert, of each parameter.
        dims: that FSDP2 shards: 0, whole experts, with zeros where the ranks do not divide them; or 1.
        ranks: number of ranks.
    """
    shards: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for experts, dim in zip(gradients, dims):
        size = -(-len(experts) // ranks)
        padded = experts + [torch.zeros_like(experts[0])] * (size * ranks - len(experts))
        for rank, shard in enumerate(shards):
            shard += [expert.chunk(ranks)[rank] for expert in experts] if dim else padded[rank * size:][:size]
    if experts[0].is_cuda:  # allocated on the stream of the backward pass
        for gradient in itertools.chain(*gradients):
            gradient.record_stream(torch.cuda.current_stream())
    return torch.cat([part.flatten() for shard in shards for part in shard])
