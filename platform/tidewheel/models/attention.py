"""Document-masked causal attention: a token sees itself and earlier tokens of its own document, nothing else.

This module alone chooses the kernel. A mask is built once per batch and shared by all layers. The kernels:

- `masked`: a boolean mask [B, 1, L, L]. Works anywhere; quadratic memory. CPUs use it.
- `flex`: compiled FlexAttention with a block mask. Any device with Triton, all forms of `document_mask`.
- `varlen`: flash attention over the documents laid end to end. CUDA, 16-bit, whole rows.
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
"""Up to this length, bf16 attention on CPU is two matrix products and a softmax. oneDNN's products take a third of the
fused CPU kernel's time (measured: B 8, L 256, 3 heads of 64, forward and backward, 7.5 against 20.8 ms)."""

Keys = Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From (attention layer, k, v of the local positions) to the k and v that queries may see. Either those of all context
ranks in the order of `key_segments`, or those of a cache followed by the new ones. Every layer calls it, after RoPE."""

Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From (q, k, v, offsets) to [B, H, Q, E]; see `document_attention`."""


@dataclass(frozen=True)
class DocumentMask:
    """The attention mask of one batch, in the form that its kernel takes.

    Args:
        kernel: "masked", "flex" or "varlen".
        dense: for masked, [B, 1, Q, K] bool, True where query i may see key j.
        blocks: for flex.
        offsets: for varlen, int32 [documents + 1], the start of each document among the B x L tokens, then B x L.
        flash: for varlen, the kernel; resolved here because a compiler traces the caller.
        keys: fetches keys and values of other ranks or of a cache; None: the local ones are complete.
    """

    kernel: str
    dense: torch.Tensor | None = None
    blocks: BlockMask | None = None
    offsets: torch.Tensor | None = None
    flash: Flash | None = None
    keys: Keys | None = None


def choose_kernel(requested: str, device: torch.device, dtype: torch.dtype, *, whole: bool = True) -> str:
    """Return the name of the attention kernel.

    Args:
        requested: a kernel's name, or "auto" for the best one here.
        device: of the queries.
        dtype: of the queries.
        whole: whether queries and keys are the same whole rows, not slices of rows.

    Raises:
        ConfigError: the requested kernel cannot run here.
    """
    able = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and whole
    if requested == "auto":
        return "masked" if device.type != "cuda" else "varlen" if able else "flex"
    if requested == "varlen" and not able:
        raise ConfigError(f"varlen attention needs CUDA, 16-bit precision and whole rows; here are {device.type}, "
                          f"{dtype} and {'whole rows' if whole else 'slices of rows'}", where="model.attention",
                          fix="set model.attention=auto")
    return requested


def document_mask(segment_ids: torch.Tensor, kernel: str = "masked", *, places: torch.Tensor | None = None,
                  key_segments: torch.Tensor | None = None, key_places: torch.Tensor | None = None,
                  keys: Keys | None = None) -> DocumentMask:
    """Return the mask of a batch.

    Padding sees padding, so no row of the mask is empty: the softmax of an empty row is not a number.

    Args:
        segment_ids: [B, Q] integers, a value for each document of a row; padding has -1.
        kernel: from `choose_kernel`.
        places: [Q] integers, index of each query in its row; default: 0, 1, ... Needed if queries are a slice of a row.
        key_segments: [B, K], segment ids of the keys; default: those of the queries.
        key_places: [K], indices of the keys, in any order; default: those of the queries.
        keys: fetches these keys, see `Keys`.
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
    """Return where documents begin among the tokens of whole rows, and the number of tokens: int32 [documents + 1].

    On a GPU the host waits here for the number of documents, once per micro-batch.

    Args:
        segment_ids: [B, L], see `document_mask`.
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
    """Compile FlexAttention; uncompiled it holds the whole score matrix."""
    return torch.compile(function)


def document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentMask) -> torch.Tensor:
    """Compute attention under a mask.

    Args:
        q: queries [B, H, Q, E].
        k: keys [B, K, L, E]; head h of q uses head h // (H / K).
        v: values [B, K, L, E].
        mask: from `document_mask`.

    Returns:
        [B, H, Q, E].
    """
    grouped = q.shape[1] != k.shape[1]
    if mask.blocks is not None:
        eager = q.is_cuda and not torch.compiler.is_compiling()  # a compiled block compiles it with the rest
        flex: Any = _compiled(flex_attention) if eager else flex_attention
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
    """Return k [B, K, L, E] with its heads repeated for the heads of q: [B, H, L, E]."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


@functools.cache
def _flash() -> Flash:
    """Return flash attention over documents laid end to end, torch's varlen attention.

    Import it on first use: it imports the compiler, 825 modules in more than a second.
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
