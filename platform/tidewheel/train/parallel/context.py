"""Context parallelism: the positions of each row are spread over ranks.

A row of L tokens is cut into 2N chunks for N ranks, and rank i keeps the chunks i and 2N-1-i: an early one, whose
queries see few keys, and a late one, so that causal attention costs every rank the same. Keys and values of the whole
row are gathered in every layer, and the queries of a rank see exactly what the document mask allows, wherever
documents begin. So did Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2), for the same reason; with
grouped-query attention keys and values are a small part of what a layer computes.

Not ring attention: torch's (`torch.distributed.tensor.experimental.context_parallel`, in 2.11 as in 2.13 an
experiment) has CUDA kernels only and takes no mask, so a token would see the documents before its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tidewheel.models.attention import DocumentMask, choose_kernel, document_mask
from tidewheel.models.decoder import Decoder
from tidewheel.models.loss import product_dtype

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first name since torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def kept_positions(length: int, rank: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """Which positions of a row of `length`, a multiple of 2 x `size`, rank `rank` of `size` keeps: [length / size]
    int64, ascending."""
    chunks = torch.arange(length, device=device).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def share(micro: MicroBatch, rank: int, size: int) -> MicroBatch:
    """The part of a micro-batch that rank `rank` of `size` computes.

    Targets were made from the whole row: the token after a chunk's last lies on another rank. Segment ids stay whole,
    for the keys; so do the counts, which one context rank reports.
    """
    if size == 1:
        return micro
    kept = kept_positions(micro.tokens.shape[1], rank, size, micro.tokens.device)
    return dataclasses.replace(micro, tokens=micro.tokens[:, kept], positions=micro.positions[:, kept],
                               targets=micro.targets[:, kept])


def apply(model: Decoder, mesh: DeviceMesh, tensor: int = 1) -> None:
    """Let `model` understand micro-batches of which it has a `share`; whole ones it computes as before.

    Args:
        mesh: one-dimensional, the ranks that share rows.
        tensor: ranks of sequence parallelism, over which the positions are spread further between layers.
    """
    model.mask = SharedRows(model, mesh, tensor).mask  # type: ignore[method-assign]


class SharedRows:
    """What attention needs to know of the positions on other ranks."""

    def __init__(self, model: Decoder, mesh: DeviceMesh, tensor: int) -> None:
        self._model, self._mask_of_whole, self._tensor = model, model.mask, tensor
        self._group, self._rank, self._size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor) -> DocumentMask:
        """In the place of `Decoder.mask`: `segment_ids` [B, L] of whole rows, x [B, L / N / T, D]."""
        length = segment_ids.shape[1]
        if x.shape[1] * self._tensor == length:  # not cut: generation
            return self._mask_of_whole(segment_ids, x)
        ranks = [kept_positions(length, rank, self._size, segment_ids.device) for rank in range(self._size)]
        mine, everyone = ranks[self._rank], torch.cat(ranks)
        kernel = choose_kernel(self._model.config.attention, x.device, product_dtype(x), whole=False)
        return document_mask(segment_ids[:, mine], kernel, places=mine,
                             key_segments=segment_ids[:, everyone], key_places=everyone, keys=self.keys)

    def keys(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, K, L / N, E] of this rank to [B, K, L, E], the positions of one rank after the other's."""
        gathered = _AllGather.apply(torch.stack((k, v)), self._group, self._size)
        k, v = gathered.unflatten(0, (self._size, 2)).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return k, v


class _AllGather(torch.autograd.Function):
    """[n, ...] of each rank to [N n, ...]; backward a reduce-scatter in fp32."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        ctx.group, ctx.shape = group, part.shape
        whole = part.new_empty(size * part.shape[0], *part.shape[1:])
        _all_gather(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (grad,) = grad_outputs
        mine = torch.empty(ctx.shape, dtype=torch.float32, device=grad.device)
        _reduce_scatter(mine, grad.float().contiguous(), group=ctx.group)
        return mine.to(grad.dtype), None, None
