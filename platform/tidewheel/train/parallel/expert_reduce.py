"""The reduction of the gradients of a layer's experts in reproducible mode, see `ordered_reduce`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from tidewheel.train.parallel.expert import ShardedExperts
from tidewheel.train.parallel.ordered_reduce import OrderedReduceScatter
from tidewheel.train.reproducible.gradient_order import GradientOrder


class _OfExperts(OrderedReduceScatter):
    """Sum of the gradients of a layer's experts, which are in their `BySource`.

    Args:
        order: knows the current micro-batch.
        experts: how experts are sharded.
        unit: the experts.
    """

    def __init__(self, order: GradientOrder, experts: ShardedExperts, unit: FSDPModule) -> None:
        assert experts.sums is not None
        super().__init__(order, experts.sums())
        self._ranks, self._unit, self._by_source = experts.mesh.size(), unit, cast(Any, unit).arithmetic
        self._by_source.new_sum = self.total.partial

    def add(self, flat: torch.Tensor) -> None:
        if not (self.order.last or self.total.swaps):
            return
        group: Any = self._unit._get_fsdp_state()._fsdp_param_group
        parameters = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        begins = {module: f"{name}." if name else "" for name, module in cast(Any, self._unit).named_modules()}
        infos = [parameter._module_info for parameter in parameters]
        taken = [self._by_source.take(begins[info.module] + info.param_name) for info in infos]
        dims = [parameter.fsdp_placement.dim for parameter in parameters]
        flats = {nodes[0][0]: _flat([gradients for _, gradients in nodes], dims, self._ranks)
                 for nodes in zip(*taken, strict=True)}
        if self.total.swaps:
            self.total.add(*flats.values())
        else:
            self.total.put(flats.items())


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
        unit.set_all_reduce_hook(lambda gradient: reduce(gradient, gradient))  # a single rank has no reduce-scatter


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
