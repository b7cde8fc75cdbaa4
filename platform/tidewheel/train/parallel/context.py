"""Context parallelism: the positions of each row are sharded over ranks.

A row of L tokens is split into 2N chunks for N ranks, and rank i keeps the chunks i and 2N-1-i. The queries of an early
chunk see few keys and those of a late chunk see many, so causal attention costs every rank the same. Keys and values of
the whole row are gathered in every layer, and the queries of a rank see exactly what the document mask allows, wherever
documents begin. Llama 3 does the same for the same reason (https://arxiv.org/abs/2407.21783, section 3.3.2). With
grouped-query attention, keys and values are a small part of a layer.

Ring attention is not used. Torch's (`torch.distributed.tensor.experimental.context_parallel`, experimental in 2.11 and
in 2.13) has CUDA kernels only and takes no mask, so a token would see the documents before its own.
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
from tidewheel.models.documents import Documents
from tidewheel.models.loss import product_dtype

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first name since torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def kept_positions(length: int, rank: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the positions of a row that a rank keeps, ascending: int64 [length / size].

    Args:
        length: of the row, a multiple of 2 x `size`.
        rank: context rank.
        size: number of context ranks.
        device: of the result.
    """
    chunks = torch.arange(length, device=device).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def share(micro: MicroBatch, rank: int, size: int) -> MicroBatch:
    """Return the part of a micro-batch that a context rank computes.

    Targets come from the whole row, because the token after a chunk's last one is on another rank. Segment ids stay
    whole for the keys. The counts also stay whole; one context rank reports them.

    Args:
        micro: whole rows.
        rank: context rank.
        size: number of context ranks.
    """
    if size == 1:
        return micro
    kept = kept_positions(micro.tokens.shape[1], rank, size, micro.tokens.device)
    return dataclasses.replace(micro, tokens=micro.tokens[:, kept], positions=micro.positions[:, kept],
                               targets=micro.targets[:, kept])


def apply(model: Decoder, mesh: DeviceMesh, tensor: int = 1) -> None:
    """Let a decoder compute its `share` of micro-batches. Whole micro-batches are computed as before.

    Args:
        model: a decoder or a pipeline stage.
        mesh: one-dimensional, the ranks that share rows.
        tensor: number of ranks of sequence parallelism, which shards positions further between layers.
    """
    model.mask = SharedRows(model, mesh, tensor).mask  # type: ignore[method-assign]


class SharedRows:
    """Attention over rows whose positions are on several ranks.

    Args:
        model: a decoder or a pipeline stage, as it was before `apply`.
        mesh: one-dimensional, the ranks that share rows.
        tensor: number of ranks of sequence parallelism.
    """

    def __init__(self, model: Decoder, mesh: DeviceMesh, tensor: int) -> None:
        self._model = model
        self._mask_of_whole = model.mask
        self._tensor = tensor
        self._group, self._rank, self._size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None,
             window: int | None = None) -> DocumentMask:
        """Return the mask of this rank's queries; replaces `Decoder.mask`.

        Args:
            segment_ids: [B, L], of whole rows.
            x: [B, L / N / T, D], this rank's positions.
            documents: of the whole rows.
            window: of a sliding window.
        """
        length = segment_ids.shape[1]
        if x.shape[1] * self._tensor == length:  # not cut: generation
            return self._mask_of_whole(segment_ids, x, documents, window)
        ranks = [kept_positions(length, rank, self._size, segment_ids.device) for rank in range(self._size)]
        own_positions = ranks[self._rank]
        all_positions = torch.cat(ranks)
        config = self._model.config
        kernel = choose_kernel(config.attention, x.device, product_dtype(x), head_width=config.head_width, whole=False,
                               plain=config.plain_attention)
        return document_mask(segment_ids[:, own_positions], kernel, window=window, places=own_positions,
                             key_segments=segment_ids[:, all_positions], key_places=all_positions, keys=self.keys)

    def keys(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys and values of all ranks, in the order of the ranks; see `models.attention.Keys`.

        Args:
            layer: not used.
            k: [B, K, L / N, E] of this rank's positions.
            v: [B, K, L / N, E].
        """
        gathered = _AllGather.apply(torch.stack((k, v)), self._group, self._size)
        k, v = gathered.unflatten(0, (self._size, 2)).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return k, v


class _AllGather(torch.autograd.Function):
    """All-gather of [n, ...] to [N n, ...]. The backward pass is a reduce-scatter in fp32."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        ctx.group, ctx.shape = group, part.shape
        whole = part.new_empty(size * part.shape[0], *part.shape[1:])
        _all_gather(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (grad,) = grad_outputs
        own_gradient = torch.empty(ctx.shape, dtype=torch.float32, device=grad.device)
        _reduce_scatter(own_gradient, grad.float().contiguous(), group=ctx.group)
        return own_gradient.to(grad.dtype), None, None
