"""Document-masked causal attention: a token sees itself and earlier tokens of its own document, nothing else.

A mask is built once per batch and shared by all layers. With a sliding window a token sees the last `window` tokens,
itself included. The kernels, which `attention_kernels` chooses:

- `masked`: a boolean mask [B, 1, L, L]. Works anywhere; quadratic memory. CPUs use it.
- `flex`: compiled FlexAttention with a block mask. Any device with Triton, all forms of `document_mask`.
- `varlen`: flash attention over the documents laid end to end. CUDA, 16-bit, complete rows.
- `causal`: torch's attention without a mask, where each row is one document. CUDA, 16-bit, complete rows.
- `blockwise`: plain torch over the tiles in which something is visible. Linear memory; CPUs use it for long rows.
- `exact`: two products and a softmax, padded so that the result of a query does not depend on the queries beside it or
  on room behind its keys. Generation and training then have the same bits, see `attention_backends.exact`.

Under context parallelism a mask may have a plan of exchanges (`attention_operator`), or exchange heads for positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tidewheel.models.attention_backends import (
    PLAIN_LENGTH,
    Causal,
    Flash,
    causal_kernel,
    compiled,
    exact,
    flash_kernel,
    flex,
    plain,
    repeated,
    with_sinks,
)
from tidewheel.models.attention_kernels import Choice, Machine, activate, choose
from tidewheel.models.attention_operator import handle_of, planned_attention
from tidewheel.models.blockwise import Blockwise, Intervals, Scores, key_intervals
from tidewheel.models.documents import Documents

Keys = Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From (attention layer, k, v of the local positions) to the k and v that queries may see. Either those of whole rows,
gathered from all context ranks, or those of a cache followed by the new ones. Every layer calls it, after RoPE."""


class Exchange(Protocol):
    """Exchanges heads for positions with other ranks, before and after attention."""

    def to_heads(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's heads of all positions, [B, h / N, L, E] of [B, h, L / N, E] each."""
        ...

    def to_positions(self, out: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's positions, [B, h, L / N, E] of [B, h / N, L, E]."""
        ...

    def own(self, per_head: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [h / N] of [h]."""
        ...


@dataclass(frozen=True)
class DocumentMask:
    """The attention mask of one batch, in the form that its kernel takes.

    Args:
        kernel: "masked", "flex", "varlen", "causal", "blockwise", "exact", "ring" or "exchange".
        dense: for masked and exact, [B, 1, Q, K] bool, True where query i may see key j.
        blocks: for flex.
        offsets: for varlen, see `Documents`.
        longest: for varlen, [n, 0] with n from `Documents.longest`: a number that compiled code takes as it comes, as
            the size of a tensor, where it would be compiled again for another integer.
        flash: for varlen, the kernel; resolved here because a compiler traces the caller.
        causal: for causal, the kernel.
        keys: fetches keys and values of other ranks or of a cache; None: the local ones are complete.
        plan: for blockwise and ring, the handle of a plan, see `attention_operator`.
        exchange: exchanges heads for positions, for which `inner` is the mask.
        inner: see `exchange`.
    """

    kernel: str
    dense: torch.Tensor | None = None
    blocks: BlockMask | None = None
    offsets: torch.Tensor | None = None
    longest: torch.Tensor | None = None
    flash: Flash | None = None
    causal: Causal | None = None
    keys: Keys | None = None
    plan: torch.Tensor | None = None
    exchange: Exchange | None = None
    inner: DocumentMask | None = None


def choose_kernel(requested: str, device: torch.device, dtype: torch.dtype, *, head_width: int = 64,
                  whole: bool = True, documents: Documents | None = None, window: int | None = None,
                  flash: str = "auto", plain: bool = True, length: int = 0) -> Choice:
    """Return the attention kernel for a micro-batch on this machine; see `attention_kernels.choose`.

    Args:
        requested: `model.attention`.
        device: of the queries.
        dtype: of the queries.
        head_width: of the queries.
        whole: whether queries and keys are the same complete rows, not slices of rows.
        documents: the layout of the micro-batch; None: it was not computed while the batch was loaded.
        window: of a sliding window.
        flash: `model.flash_attention`.
        plain: see `Model.plain_attention`.
        length: tokens of a row.

    Raises:
        ConfigError: the requested kernel cannot run here.
    """
    whole_rows = documents is not None and documents.whole_rows
    return choose(requested, Machine.of(device), dtype, head_width, rows_complete=whole, whole_rows=whole_rows,
                  window=window is not None, flash=flash, plain=plain, length=length)


def document_mask(segment_ids: torch.Tensor, kernel: str | Choice = "masked", *, documents: Documents | None = None,
                  window: int | None = None, places: torch.Tensor | None = None,
                  key_segments: torch.Tensor | None = None, key_places: torch.Tensor | None = None,
                  keys: Keys | None = None) -> DocumentMask:
    """Return the mask of a batch.

    Padding sees padding, so no row of the mask is empty: the softmax of an empty row is not a number. With `causal`
    padding sees its row's document, which changes nothing: no document sees padding, and padding has no target.

    Args:
        segment_ids: [B, Q] integers, a value for each document of a row; padding has -1.
        kernel: from `choose_kernel`, or a kernel's name.
        documents: where documents begin. Without it varlen finds them on the device, for which the host waits, and
            causal is not checked.
        window: number of tokens that a token sees, itself included; None: all earlier ones of its document.
        places: [Q] integers, index of each query in its row; default: 0, 1, ... Needed if queries are a slice of a row.
        key_segments: [B, K], segment ids of the keys; default: those of the queries.
        key_places: [K], indices of the keys, in any order; default: those of the queries.
        keys: fetches these keys, see `Keys`.

    Raises:
        ValueError: the window is not positive, or causal is asked for rows of several documents.
    """
    choice = Choice(kernel) if isinstance(kernel, str) else kernel
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens: a token sees at least itself, so the window is at least 1")
    if places is None and window is not None and window >= segment_ids.shape[1]:
        window = None  # no token is that far from another
    if choice.kernel == "varlen":
        offsets = document_offsets(segment_ids) if documents is None else documents.offsets.to(segment_ids.device)
        longest = offsets.new_empty(segment_ids.shape[1] if documents is None else documents.longest, 0)
        _mark_dynamic(offsets, longest)
        flash = flash_kernel(activate(choice.flash), window)
        return DocumentMask("varlen", offsets=offsets, longest=longest, flash=flash, keys=keys)
    if choice.kernel == "causal" and window is None:
        if documents is not None and not documents.whole_rows:
            raise ValueError("causal attention takes rows of one document, but a row has several; use varlen")
        return DocumentMask("causal", causal=causal_kernel(activate(choice.flash), choice.cudnn), keys=keys)
    if choice.kernel == "blockwise" and places is None:
        whole = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
        return interval_mask(key_intervals(segment_ids, whole, window=window), "blockwise", segment_ids.shape[1], keys)
    if places is None:
        places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    if key_segments is None or key_places is None:
        key_segments, key_places = segment_ids, places
    if choice.kernel == "flex":
        blocks = _block_mask(segment_ids, places, key_segments, key_places, window)
        return DocumentMask("flex", blocks=blocks, keys=keys)
    visible = (segment_ids[:, :, None] == key_segments[:, None, :]) & (places[:, None] >= key_places)
    if window is not None:
        visible = visible & (places[:, None] - key_places < window)
    return DocumentMask("exact" if choice.kernel == "exact" else "masked", dense=visible[:, None], keys=keys)


def interval_mask(seen: Intervals, kernel: str, length: int, keys: Keys | None = None) -> DocumentMask:
    """Return the mask of queries that each see an interval of the keys.

    Args:
        seen: the intervals.
        kernel: "masked", "flex" or "blockwise".
        length: number of keys.
        keys: fetches the keys, see `Keys`.
    """
    if kernel == "blockwise":
        return DocumentMask("blockwise", plan=handle_of(Blockwise(seen)), keys=keys)
    if kernel == "flex":
        return DocumentMask("flex", blocks=interval_blocks(seen, length), keys=keys)
    return DocumentMask("masked", dense=seen.dense(length), keys=keys)


def document_offsets(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return where documents begin among the tokens of whole rows, and the number of tokens: int32 [documents + 1].

    On a GPU the host waits here for the number of documents. Training has `Documents` instead.

    Args:
        segment_ids: [B, L], see `document_mask`.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return F.pad(begins.flatten().nonzero().flatten().int(), (0, 1), value=segment_ids.numel())


def _mark_dynamic(*tensors: torch.Tensor) -> None:
    """Let the compiler take tensors of any length: by default it would compile again for the second length."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            if tensor.shape[0] > 1:  # sizes 0 and 1 always have code of their own
                torch._dynamo.mark_dynamic(tensor, 0)


def _block_mask(segment_ids: torch.Tensor, places: torch.Tensor, key_segments: torch.Tensor,
                key_places: torch.Tensor, window: int | None) -> BlockMask:
    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (segment_ids[b, q] == key_segments[b, k]) & (places[q] >= key_places[k])

    def near(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        assert window is not None
        return visible(b, h, q, k) & (places[q] - key_places[k] < window)

    create = compiled(create_block_mask) if segment_ids.is_cuda else create_block_mask
    (rows, queries), keys = segment_ids.shape, key_segments.shape[1]
    return create(visible if window is None else near, rows, None, queries, keys, device=segment_ids.device)


def interval_blocks(seen: Intervals, length: int) -> BlockMask:
    """Return FlexAttention's mask of queries that each see an interval of the keys; see `interval_mask`."""
    def inside(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k >= seen.first[b, q]) & (k < seen.last[b, q])

    create = compiled(create_block_mask) if seen.first.is_cuda else create_block_mask
    rows, queries = seen.first.shape
    return create(inside, rows, None, queries, length, device=seen.first.device)


def document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentMask, *,
                       scale: float | None = None, soft_cap: float | None = None,
                       sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Compute attention under a mask.

    Args:
        q: queries [B, H, Q, E].
        k: keys [B, K, L, E]; head h of q uses head h // (H / K).
        v: values [B, K, L, E].
        mask: from `document_mask`.
        scale: factor of the scores q k; default: 1 / sqrt(E).
        soft_cap: c of c tanh(scores / c); default: scores stay. Only masked and flex can.
        sinks: [H], logits that join the softmax of their head and have no value. Only masked and flex can.

    Returns:
        [B, H, Q, E].

    Raises:
        ValueError: the mask's kernel has neither soft-capping nor sinks.
    """
    if mask.exchange is not None and mask.inner is not None:
        q, k, v = mask.exchange.to_heads(q, k, v)
        sinks = None if sinks is None else mask.exchange.own(sinks)
        out = document_attention(q, k, v, mask.inner, scale=scale, soft_cap=soft_cap, sinks=sinks)
        return mask.exchange.to_positions(out)
    if mask.plan is not None:
        out, lse = planned_attention(q, k, v, mask.plan, Scores(scale or q.shape[-1] ** -0.5, soft_cap or 0.0))
        return out if sinks is None else with_sinks(out, lse, sinks)
    if mask.blocks is not None:
        return flex(q, k, v, mask.blocks, scale, soft_cap, sinks)
    if mask.dense is None:
        if soft_cap is not None or sinks is not None:
            raise ValueError(f"{mask.kernel} attention has neither soft-capping nor sinks; use masked or flex")
        if scale is not None:  # these kernels multiply by 1 / sqrt(E)
            q = q * (scale * q.shape[-1] ** 0.5)
    if mask.flash is not None and mask.offsets is not None and mask.longest is not None:
        return mask.flash(q, k, v, mask.offsets, mask.longest.shape[0])
    if mask.causal is not None:
        return mask.causal(q, k, v)
    assert mask.dense is not None
    if mask.kernel == "exact":
        return exact(q, k, v, mask.dense, scale)
    if q.shape[2] == 1 and q.shape[1] != k.shape[1] and sinks is None:
        # the heads that share keys see the same ones: as queries of one head they need no copies of keys and values
        together = q.reshape(*k.shape[:2], -1, q.shape[3])
        out = document_attention(together, k, v, mask, scale=scale, soft_cap=soft_cap)
        return out.reshape(*q.shape[:3], -1)
    k, v = repeated(q, k), repeated(q, v)
    is_short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[2] <= PLAIN_LENGTH
    if is_short or soft_cap is not None or sinks is not None:
        return plain(q, k, v, mask.dense, scale, soft_cap, sinks)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, scale=scale)
