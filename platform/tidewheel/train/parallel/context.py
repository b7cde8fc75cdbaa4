"""Context parallelism: the positions of each row are sharded over ranks, which exchange what attention needs.

`parallel.context_method` chooses what they exchange:

- `all_gather`: every layer gathers the keys and values of whole rows, and the queries of a rank see exactly what the
  document mask allows. Llama 3 does the same for the same reason (https://arxiv.org/abs/2407.21783, section 3.3.2):
  with grouped-query attention, keys and values are a small part of a layer.
- `all_to_all`: positions for heads, see `head_exchange`.
- `ring`: keys and values pass from rank to rank, see `ring`; for rows whose keys do not fit.

`partition` decides which positions a rank keeps. Targets are made before, because the token after a rank's last one is
on another rank. Torch's own context parallelism (`torch.distributed.tensor.experimental`, still experimental in 2.13)
is not used: it takes no mask, so a token would see the documents before its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tidewheel.models.attention import DocumentMask, choose_kernel, interval_mask
from tidewheel.models.attention_operator import Plan, handle_of
from tidewheel.models.blockwise import Blockwise, key_intervals
from tidewheel.models.decoder import Decoder
from tidewheel.models.documents import Documents
from tidewheel.models.loss import product_dtype
from tidewheel.models.noise import EmbeddingNoise
from tidewheel.models.recomputed_attention import RecomputedAttention, flex_attend
from tidewheel.train.objective import TopK
from tidewheel.train.parallel import partition
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.head_exchange import HeadExchange
from tidewheel.train.parallel.ring import Ring

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first name since torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class SharedDocuments(Documents):
    """The documents of whole rows whose positions are divided among context ranks.

    Args:
        places: int64 [N, B, L / N] on the training device, the positions of each rank in each row, rising.
        starts: int64 [B, L] on the host, for each position the position at which its document begins.
        divided: `places` on the host.
    """

    places: torch.Tensor
    starts: np.ndarray
    divided: np.ndarray


@dataclass(frozen=True)
class RowShare:
    """Which part of each row this rank computes.

    Args:
        rank: context rank.
        size: number of context ranks.
        parallel: the layout.
        windows: of each layer of the whole model; None: a token sees all earlier ones of its document.
    """

    rank: int
    size: int
    parallel: ParallelConfig
    windows: tuple[int | None, ...] = (None,)

    def of(self, micro: MicroBatch) -> MicroBatch:
        """Return the part of a micro-batch that this rank computes.

        Segment ids stay whole for the keys. The counts also stay whole; one context rank reports them.

        Args:
            micro: whole rows.
        """
        if self.size == 1:
            return micro
        documents = self.divide(micro)
        own = documents.places[self.rank]
        noise, teacher = micro.noise, micro.teacher
        if noise is not None:
            noise = EmbeddingNoise(noise.keys.gather(1, own), noise.scales.gather(1, own))
        if isinstance(teacher, TopK):
            teacher = TopK(torch.take_along_dim(teacher.tokens, own[..., None], dim=1),
                           torch.take_along_dim(teacher.log_probabilities, own[..., None], dim=1))
        return dataclasses.replace(micro, tokens=micro.tokens.gather(1, own), positions=micro.positions.gather(1, own),
                                   targets=micro.targets.gather(1, own), documents=documents, noise=noise,
                                   teacher=teacher)

    def divide(self, micro: MicroBatch) -> SharedDocuments:
        """Return which positions of a micro-batch each rank computes.

        Args:
            micro: whole rows.
        """
        documents = micro.documents or Documents.of(micro.segment_ids)
        (rows, length), device = micro.tokens.shape, micro.tokens.device
        starts = partition.starts_of(documents.on_host, rows, length)
        if self.parallel.context_method == "all_to_all":  # every rank attends to whole rows
            divided = np.repeat(partition.contiguous(length, self.size)[:, None], rows, axis=1)
        else:
            costs = partition.visible_keys(starts, self.windows)
            divided = partition.divide(costs, self.size, self.parallel.context_balance)
        places = torch.from_numpy(divided).to(device, non_blocking=True)
        return SharedDocuments(documents.offsets, documents.whole_rows, documents.longest, documents.on_host,
                               places, starts, divided)


def apply(model: Decoder, mesh: DeviceMesh, parallel: ParallelConfig) -> None:
    """Let a decoder compute its `RowShare` of micro-batches. Whole micro-batches are computed as before.

    Args:
        model: a decoder or a pipeline stage.
        mesh: one-dimensional, the ranks that share rows.
        parallel: the layout.
    """
    model.mask = SharedRows(model, mesh, parallel).mask  # type: ignore[method-assign]


class SharedRows:
    """Attention over rows whose positions are on several ranks.

    Args:
        model: a decoder or a pipeline stage, as it was before `apply`.
        mesh: one-dimensional, the ranks that share rows.
        parallel: the layout.
    """

    def __init__(self, model: Decoder, mesh: DeviceMesh, parallel: ParallelConfig) -> None:
        self._model = model
        self._mask_of_whole = model.mask
        self._method = parallel.context_method
        self._group, self._rank, self._size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._heads = HeadExchange(self._group, self._rank, self._size)

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None,
             window: int | None = None) -> DocumentMask:
        """Return the mask of this rank's queries for the blocks of one window; replaces `Decoder.mask`.

        Args:
            segment_ids: [B, L], of whole rows.
            x: [B, L / N / T, D], this rank's positions.
            documents: from `RowShare`. Others are of rows that are not divided, as in generation.
            window: see `Decoder.mask`.
        """
        if not isinstance(documents, SharedDocuments):
            return self._mask_of_whole(segment_ids, x, documents, window)
        if self._method == "all_to_all":
            return DocumentMask("exchange", exchange=self._heads,
                                inner=self._mask_of_whole(segment_ids, x, documents, window))
        config = self._model.config
        kernel = choose_kernel(config.attention, x.device, product_dtype(x), head_width=config.head_width, whole=False,
                               window=window, plain=config.plain_attention, length=segment_ids.shape[1]).kernel
        if self._method == "ring":
            plan = Ring(list(self._pieces(segment_ids, documents, window, kernel)), self._group, self._rank, self._size)
            return DocumentMask("ring", plan=handle_of(plan))
        return self._gathered(segment_ids, documents, window, kernel)

    def _gathered(self, segment_ids: torch.Tensor, documents: SharedDocuments, window: int | None,
                  kernel: str) -> DocumentMask:
        """Return the mask of queries that see the keys of whole rows, which are gathered in the order of the row."""
        seen = key_intervals(segment_ids, documents.places[self._rank], window=window)
        return interval_mask(seen, kernel, segment_ids.shape[1], keys=GatheredKeys(documents.places, self._group))

    def _pieces(self, segment_ids: torch.Tensor, documents: SharedDocuments, window: int | None,
                kernel: str) -> Iterator[Plan | None]:
        """Yield the attention of this rank's queries to the keys that have made 0, 1, ... hops."""
        for hops in range(partition.hops(documents.divided, documents.starts, window)):
            source = (self._rank - hops) % self._size
            if not partition.pairs(documents.divided[self._rank], documents.divided[source], documents.starts, window):
                yield None
                continue
            seen = key_intervals(segment_ids, documents.places[self._rank], documents.places[source], window)
            if kernel == "flex":
                yield RecomputedAttention(flex_attend(seen, documents.places.shape[-1]))
            else:
                yield Blockwise(seen)


class GatheredKeys:
    """Gathers the keys and values of all context ranks in the order of the row; see `models.attention.Keys`.

    Args:
        places: int64 [N, B, L / N], the positions of each rank.
        group: process group of the context ranks.
    """

    def __init__(self, places: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._places, self._group = places, group
        self._order = places.transpose(0, 1).flatten(1).argsort(dim=1)

    def __call__(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k [B, K, L, E] and v [B, K, L, V] of whole rows.

        Args:
            layer: not used.
            k: [B, K, L / N, E] of this rank's positions.
            v: [B, K, L / N, V].
        """
        both = torch.cat((k, v), dim=-1)  # values may be narrower than keys
        whole = _GatherRows.apply(both, self._places, self._order, self._group)
        k_whole, v_whole = whole.split((k.shape[-1], v.shape[-1]), dim=-1)
        return k_whole, v_whole


class _GatherRows(torch.autograd.Function):
    """Gather [B, K, L / N, E] of all ranks to [B, K, L, E] in the order of the row.

    The backward pass is a reduce-scatter in fp32.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, places: torch.Tensor, order: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.shape = group, part.shape
        ctx.save_for_backward(places)
        whole = part.new_empty(places.shape[0] * part.shape[0], *part.shape[1:])
        _all_gather(whole, part.contiguous(), group=group)
        by_rank = whole.unflatten(0, (-1, part.shape[0])).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return by_rank.gather(2, order[:, None, :, None].expand_as(by_rank))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (grad,) = grad_outputs
        (places,) = ctx.saved_tensors
        by_rank = places.transpose(0, 1).flatten(1)  # a gather: autograd would scatter, in an order of its own
        parts = grad.float().gather(2, by_rank[:, None, :, None].expand_as(grad))
        parts = parts.unflatten(2, (places.shape[0], -1)).movedim(2, 0).flatten(0, 1).contiguous()
        own_gradient = torch.empty(ctx.shape, dtype=torch.float32, device=grad.device)
        _reduce_scatter(own_gradient, parts, group=ctx.group)
        return own_gradient.to(grad.dtype), None, None, None
