"""Document-masked causal attention: a token sees itself and earlier tokens of its own document, nothing else.

The one place that chooses a kernel. A mask is built once per batch and shared by all layers:

- `masked`: a boolean [B, 1, L, L]; exact anywhere, quadratic memory. What a CPU uses.
- `flex`: FlexAttention with a block mask, compiled; any device with Triton, any of the forms of `document_mask`.
- `varlen`: flash attention over the documents laid end to end; CUDA, 16-bit, whole rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tidewheel.errors import ConfigError

PLAIN_LENGTH = 1024
"""Up to this length bf16 attention on CPU is two matrix products and a softmax: its oneDNN products take a third of
the time of the fused CPU kernel (measured: B 8, L 256, 3 heads of 64, forward and backward, 7.5 against 20.8 ms)."""

Keys = Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(attention layer, k, v of the local positions) to the k and v that the queries may see: those of all context ranks
in the order of `key_segments`, or a cache's with the new ones behind. Called by every layer, after RoPE."""

Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q, k, v as for `document_attention`, offsets) to its result."""


@dataclass(frozen=True)
class DocumentMask:
    """Who sees whom in one batch, in the form its kernel takes."""

    kernel: str
    dense: torch.Tensor | None = None
    """masked: [B, 1, Q, K] bool, True where query i may see key j."""
    blocks: BlockMask | None = None
    """flex."""
    offsets: torch.Tensor | None = None
    """varlen: int32 [documents + 1], where each document begins among the B x L tokens, and their number."""
    flash: Flash | None = None
    """varlen: the kernel, found before a compiler looks at its caller."""
    keys: Keys | None = None
    """Brings keys and values from elsewhere; None: the local ones are all there are."""


def choose_kernel(wanted: str, device: torch.device, dtype: torch.dtype, *, whole: bool = True) -> str:
    """The kernel for `wanted` ("auto" or a name) and queries of `dtype`; `whole`: queries and keys are the same rows.

    Raises:
        ConfigError: `wanted` cannot be had here.
    """
    able = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and whole
    if wanted == "auto":
        return "masked" if device.type != "cuda" else "varlen" if able else "flex"
    if wanted == "varlen" and not able:
        raise ConfigError(f"varlen attention needs CUDA, 16-bit precision and whole rows; here are {device.type}, "
                          f"{dtype} and {'whole rows' if whole else 'slices of rows'}", where="model.attention",
                          mend="set model.attention=auto")
    return wanted


def document_mask(segment_ids: torch.Tensor, kernel: str = "masked", *, places: torch.Tensor | None = None,
                  key_segments: torch.Tensor | None = None, key_places: torch.Tensor | None = None,
                  keys: Keys | None = None) -> DocumentMask:
    """The mask of a batch. Padding sees padding, so no row of it is empty (an empty softmax is not a number).

    Args:
        segment_ids: [B, Q] integers, one value per document in a row, padding its own (-1).
        kernel: from `choose_kernel`.
        places: [Q] where in the row each query stands; default: 0, 1, ... Needed when queries are a slice of it.
        key_segments, key_places: [B, K] and [K], the same of the keys; default: those of the queries. Keys may come in
            any order.
        keys: what fetches those keys, see `Keys`.
    """
    if kernel == "varlen":
        return DocumentMask(kernel, offsets=document_offsets(segment_ids), flash=_flash(), keys=keys)
    if places is None:
        places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    if key_segments is None or key_places is None:
        key_segments, key_places = segment_ids, places
    if kernel == "flex":
        return DocumentMask(kernel, blocks=_block_mask(segment_ids, places, key_segments, key_places), keys=keys)
    same = segment_ids[:, :, None] == key_segments[:, None, :]
    return DocumentMask(kernel, dense=(same & (places[:, None] >= key_places))[:, None], keys=keys)


def document_offsets(segment_ids: torch.Tensor) -> torch.Tensor:
    """int32 [documents + 1]: where documents begin among the B x L tokens of whole rows, and the number of tokens.

    On a GPU the host waits here for their number, once per micro-batch.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return F.pad(begins.flatten().nonzero().flatten().int(), (0, 1), value=segment_ids.numel())


def _block_mask(segment_ids: torch.Tensor, places: torch.Tensor, key_segments: torch.Tensor,
                key_places: torch.Tensor) -> BlockMask:
    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (segment_ids[b, q] == key_segments[b, k]) & (places[q] >= key_places[k])

    create = _compiled(create_block_mask) if segment_ids.is_cuda else create_block_mask
    (rows, queries), keys = segment_ids.shape, key_segments.shape[1]
    return create(visible, rows, None, queries, keys, device=segment_ids.device)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Uncompiled, FlexAttention holds the whole score matrix."""
    return torch.compile(function)


def document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentMask) -> torch.Tensor:
    """Attention under `mask`.

    Args:
        q: [B, H, Q, E].
        k, v: [B, K, L, E]; head h of q uses head h // (H / K).
        mask: from `document_mask`.

    Returns:
        [B, H, Q, E].
    """
    grouped = q.shape[1] != k.shape[1]
    if mask.blocks is not None:
        alone = q.is_cuda and not torch.compiler.is_compiling()  # in a compiled block it is compiled with the rest
        flex: Any = _compiled(flex_attention) if alone else flex_attention
        return flex(q, k, v, block_mask=mask.blocks, enable_gqa=grouped)
    if mask.flash is not None and mask.offsets is not None:
        return mask.flash(q, k, v, mask.offsets)
    if grouped:
        k, v = _repeated(q, k), _repeated(q, v)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[2] <= PLAIN_LENGTH:
        assert mask.dense is not None
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        return scores.masked_fill(~mask.dense, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense)


def _repeated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """k with a head for each head of q."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


@functools.cache
def _flash() -> Flash:
    """Flash attention over documents laid end to end, by torch's varlen attention.

    Imported by those who use it: it brings the compiler along, 825 modules and more than a second.
    """
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    shares = "enable_gqa" in takes  # not in torch 2.11
    if shares:
        options["enable_gqa"] = True

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if not shares:
            k, v = _repeated(q, k), _repeated(q, v)
        rows, length = q.shape[0], q.shape[2]
        laid = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # [B x L, heads, E]
        # the longest possible document: its true length would have to be read from the device
        out = varlen_attn(*laid, offsets, offsets, length, length, **options)  # type: ignore[call-arg, misc, arg-type]
        return out.unflatten(0, (rows, length)).transpose(1, 2)  # type: ignore[union-attr]

    return attend
