"""Attention of one new token in each row, without padding where that has the bits of exact attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tidewheel.inference.matrices import cancelling
from tidewheel.models.attention_backends import EXACT_KEYS, EXACT_ROWS, EXACT_SUM, HIDDEN, exact, weighted_sum


def filled(length: int) -> int:
    """Return the number of keys that exact attention takes for a number of tokens."""
    return -(-length // EXACT_KEYS) * EXACT_KEYS


Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From (scaled q [n, H, E], k [n, K, E, L], v [n, K, L, E], number of keys that are seen) to [n, H, E]."""


def attention_for(q: torch.Tensor, keys: torch.Tensor, is_exact: bool) -> Way:
    """Return the fastest attention for these shapes; if it must be exact, one that was found to have those bits.

    Args:
        q: [n, H, E].
        keys: [n, K, E, L].
        is_exact: whether the bits must be those of `exact`.
    """
    if not is_exact:
        return single
    shape = (*q.shape, *keys.shape, q.dtype, torch.get_num_threads())
    if shape not in _FOUND:
        ways: dict[int, Way] = {1: single, 2: doubled} if q.shape[1] == keys.shape[1] else {1: single}
        same = [way for times, way in ways.items() if _is_exact(q, keys, times)]
        _FOUND[shape] = same[0] if same else padded
    return _FOUND[shape]


def _is_exact(q: torch.Tensor, keys: torch.Tensor, times: int) -> bool:
    """Return whether all products of attention have the bits of `exact` if a key head has all its queries `times`.

    Args:
        q: [n, H, E], only its shape and dtype count.
        keys: [n, K, E, L], only its shape counts.
        times: how often each query is a row of the products.
    """
    products, width, length = keys.shape[0] * keys.shape[1], *keys.shape[2:]
    queries = times * q.shape[1] // keys.shape[1]
    many = max(queries, EXACT_ROWS)
    blocks = {min(length, EXACT_SUM), length % EXACT_SUM or EXACT_SUM}  # of keys whose values are added
    for inputs, outputs, is_transposed in ((width, length, True), *((block, width, False) for block in blocks)):
        x, other = cancelling(products * many, products * outputs, inputs, q.dtype)
        x, other = x.view(products, many, inputs), other.view(products, outputs, inputs).transpose(1, 2)
        expected = torch.bmm(x, other if is_transposed else other.contiguous())[:, :queries]
        if not torch.equal(torch.bmm(x[:, :queries].contiguous(), other.contiguous()), expected):
            return False
    return True


_FOUND: dict[Any, Way] = {}
"""By shape: how this process attends."""


def single(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int) -> torch.Tensor:
    """Attend, with the queries that share a key head as the rows of a product.

    Args:
        q: scaled queries [n, H, E].
        keys: [n, K, E, L].
        values: [n, K, L, E].
        seen: number of keys that are seen.
    """
    count, heads, width = q.shape
    kv_heads, shown = keys.shape[1], keys.shape[3]
    scores = torch.bmm(q.view(count * kv_heads, -1, width), keys.flatten(0, 1)).float()
    if seen < shown:
        scores[..., seen:].fill_(HIDDEN)
    weights = scores.softmax(dim=-1).to(values.dtype)
    return weighted_sum(weights, values.flatten(0, 1)).view(count, heads, width)


def doubled(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int) -> torch.Tensor:
    """Attend with each query twice, for products that need two rows.

    Args:
        q: scaled queries [n, H, E].
        keys: [n, K, E, L].
        values: [n, K, L, E].
        seen: number of keys that are seen.
    """
    count, heads, width = q.shape
    twice = q[:, :, None].expand(-1, -1, 2, -1).reshape(count, 2 * heads, width)
    return single(twice, keys, values, seen).view(count, heads, 2, width)[:, :, 0]


def padded(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int) -> torch.Tensor:
    """Attend as the modules do.

    Args:
        q: scaled queries [n, H, E].
        keys: [n, K, E, L].
        values: [n, K, L, E].
        seen: number of keys that are seen.
    """
    dense = (torch.arange(keys.shape[3]) < seen)[None, None, None]
    return exact(q[:, :, None], keys.transpose(2, 3).contiguous(), values.contiguous(), dense, 1.0).flatten(1, 2)
