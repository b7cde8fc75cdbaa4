"""The functions that compute attention, for the kernels that `attention_kernels` chooses. They know no documents."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

PLAIN_LENGTH = 1024
"""Up to this length, bf16 attention on CPU is two matrix products and a softmax. oneDNN's products take a third of the
fused CPU kernel's time (measured: B 8, L 256, 3 heads of 64, forward and backward, 7.5 against 20.8 ms)."""

EXACT_ROWS, EXACT_KEYS = 16, 32
"""See `exact`. 4 rows are enough on one thread; 12 on two, of the row counts that were tried."""
EXACT_SUM = 128
"""Keys whose values are added by one product: a longer sum is divided into blocks that depend on its length. Measured:
from 352 keys on in fp32 and 384 in bf16 with an Intel CPU, from 160 on in fp32 with a fourth-generation AMD EPYC."""
HIDDEN = -1e30
"""Score of a key that a query does not see. Minus infinity would make a row that sees nothing not a number."""

Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From (q, k, v, offsets, tokens of the longest document) to [B, H, Q, E]; see `document_attention`."""
Causal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From (q, k, v) to [B, H, Q, E]; see `document_attention`."""


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile FlexAttention; uncompiled it holds the whole score matrix."""
    return torch.compile(function)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: torch.Tensor, scale: float | None,
           soft_cap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Compute attention as two products and a softmax, with the score matrix in memory; see `document_attention`.

    Args:
        q: queries [B, H, Q, E].
        k: keys [B, H, L, E].
        v: values [B, H, L, E].
        dense: bool [B, 1, Q, L], True where a query sees a key.
        scale: see `document_attention`.
        soft_cap: see `document_attention`.
        sinks: see `document_attention`.
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~dense, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(v.dtype) @ v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Compute attention so that a query's result has the same bits however many queries and keys stand beside its own.

    Libraries choose a kernel by the shape of a product, and kernels round differently. On the CPUs measured here a row
    of a product has the same bits beside any number of rows from `EXACT_ROWS` on, and zeros behind the end of a sum
    change nothing, unless the sum is long. So queries of a key head are padded to that many rows, keys to a multiple of
    `EXACT_KEYS`, and values are added in blocks of `EXACT_SUM` keys, one after the other.

    Args:
        q: queries [B, H, Q, E].
        k: keys [B, K, L, E]; head h of q uses head h // (H / K).
        v: values [B, K, L, E].
        dense: bool [B, 1, Q, L], True where a query sees a key.
        scale: see `document_attention`.
    """
    rows, heads, queries, width = q.shape
    keys = k.shape[1]
    share = heads // keys  # query heads of a key head
    missing = max(0, -(-EXACT_ROWS // share) - queries)
    room = -k.shape[2] % EXACT_KEYS
    hidden = F.pad(~dense, (0, room, 0, missing), value=True).expand(rows, 1, -1, -1)
    q = _extended(q * (width ** -0.5 if scale is None else scale), missing)
    k, v = (_extended(part, room).flatten(0, 1) for part in (k, v))
    scores = torch.bmm(q.reshape(rows * keys, -1, width), k.transpose(1, 2)).float()
    scores = scores.view(rows, heads, queries + missing, -1).masked_fill(hidden, HIDDEN)
    weights = scores.softmax(dim=-1).to(v.dtype)
    weights = weights.view(rows * keys, -1, v.shape[1])
    return weighted_sum(weights, v).view(rows, heads, queries + missing, v.shape[2])[:, :, :queries]


def weighted_sum(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Add values in blocks of `EXACT_SUM` keys, one after the other; return [P, R, E].

    Args:
        weights: [P, R, L].
        v: values [P, L, E].
    """
    out = torch.bmm(weights[:, :, :EXACT_SUM], v[:, :EXACT_SUM])
    if v.shape[1] > EXACT_SUM:
        blocks = zip(weights.split(EXACT_SUM, dim=2)[1:], v.split(EXACT_SUM, dim=1)[1:])
        out = sum((torch.bmm(*block).float() for block in blocks), start=out.float()).to(v.dtype)
    return out


def _extended(x: torch.Tensor, zeros: int) -> torch.Tensor:
    """Return [B, H, L + zeros, E], without a copy if nothing is added."""
    return F.pad(x, (0, 0, 0, zeros)) if zeros else x


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: BlockMask, scale: float | None,
          soft_cap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Compute attention with FlexAttention; see `document_attention`.

    Args:
        q: queries [B, H, Q, E].
        k: keys [B, K, L, E].
        v: values [B, K, L, E].
        blocks: the mask.
        scale: see `document_attention`.
        soft_cap: see `document_attention`.
        sinks: see `document_attention`.
    """
    eager = q.is_cuda and not torch.compiler.is_compiling()  # a compiled block compiles it with the rest
    attend: Any = compiled(flex_attention) if eager else flex_attention
    options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": q.shape[1] != k.shape[1], "scale": scale}
    if soft_cap is not None:
        options["score_mod"] = _soft_cap(soft_cap)
    if sinks is None:
        return attend(q, k, v, **options)
    out, aux = attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return with_sinks(out, aux.lse, sinks)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return attention with sinks from attention without, out [B, H, Q, V], and its normalisers, lse [B, H, Q].

    A sink adds exp(sink) to the denominator, which is exp(lse): the result without it is multiplied by
    exp(lse) / (exp(lse) + exp(sink)).

    Args:
        out: without sinks.
        lse: logarithms of the denominators, fp32.
        sinks: [H], a logit for each query head.
    """
    return out * torch.sigmoid(lse - sinks[None, :, None].float())[..., None].to(out.dtype)


@functools.cache
def _soft_cap(cap: float) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's `score_mod` of soft-capping."""
    def capped(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def repeated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return k [B, K, L, E] with its heads repeated for the heads of q: [B, H, L, E]."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


@functools.cache
def causal_kernel(flash: str, cudnn: bool) -> Causal:
    """Return causal attention over whole rows, in the order of torch's kernels that `Choice` asks for.

    Args:
        flash: the active implementation of flash attention, part of the key of the cache.
        cudnn: try cuDNN before flash attention.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if cudnn:
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attend


@functools.cache
def flash_kernel(flash: str, window: int | None = None) -> Flash:
    """Return flash attention over documents laid end to end, torch's varlen attention.

    Import it on first use: it imports the compiler, 825 modules in more than a second.

    Args:
        flash: the active implementation, part of the key of the cache.
        window: see `document_mask`.
    """
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    earlier = -1 if window is None else window - 1  # torch counts the tokens before the query, not the query itself
    options: dict[str, Any] = {"window_size": (earlier, 0)}
    shares = "enable_gqa" in takes  # not in torch 2.11
    if shares:
        options["enable_gqa"] = True

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, longest: int) -> torch.Tensor:
        if not shares:
            k, v = repeated(q, k), repeated(q, v)
        rows, length = q.shape[0], q.shape[2]
        laid = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # [B x L, heads, E]
        out = varlen_attn(*laid, offsets, offsets, longest, longest, **options)  # type: ignore[call-arg, misc, arg-type]
        return out.unflatten(0, (rows, length)).transpose(1, 2)  # type: ignore[union-attr]

    return attend
