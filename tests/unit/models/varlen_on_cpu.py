"""CPU kernels of torch's varlen attention, by brute force: one document and one query at a time.

torch has this operator for CUDA alone. With these kernels its own public function, its schema, its shape functions and
its formula of the backward pass run on a CPU, so tests cover every argument that Tidewheel passes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

_CALLS: list[dict[str, Any]] = []


@contextlib.contextmanager
def varlen_on_cpu() -> Iterator[list[dict[str, Any]]]:
    """Run torch's varlen operator on a CPU inside the block; yield the arguments of its forward calls."""
    _register()
    _CALLS.clear()
    yield _CALLS


@functools.cache
def _register() -> None:
    from torch.nn.attention import varlen

    names = list(inspect.signature(varlen._varlen_attn._init_fn).parameters)
    backward_names = list(inspect.signature(varlen._varlen_attn_backward._init_fn).parameters)

    def forward(*arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        call = {**dict(zip(names, arguments)), **named}
        _CALLS.append(call)
        return *_forward(call), torch.zeros(2, dtype=torch.uint64)

    def backward(*arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        return _backward({**dict(zip(backward_names, arguments)), **named})

    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)


def _visible(call: dict[str, Any]) -> Iterator[tuple[int, slice]]:
    """Yield each query with the keys that it sees, after the checks that the CUDA kernel makes."""
    offsets = call["cu_seq_q"]
    assert offsets.dtype == torch.int32
    assert offsets.is_contiguous()
    assert torch.equal(offsets, call["cu_seq_k"])
    assert int(offsets[0]) == 0
    assert int(offsets[-1]) == len(call["query"])
    earlier, later = call["window_size"]
    for first, last in itertools.pairwise(offsets.tolist()):
        assert 0 <= last - first <= call["max_q"] == call["max_k"]
        for query in range(first, last):
            begin = first if earlier < 0 else max(first, query - earlier)
            end = last if later < 0 and not call["is_causal"] else min(last, query + 1 + max(later, 0))
            yield query, slice(begin, end)


def _doubles(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v in fp64, with the key heads repeated for the query heads."""
    q, k, v = (call[name].double() for name in ("query", "key", "value"))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _forward(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [T, H, E] and the normalisers, fp32 [H, T]."""
    q, k, v = _doubles(call)
    out, normalisers = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for query, keys in _visible(call):
        scores = torch.einsum("he,khe->hk", q[query], k[keys]) / math.sqrt(q.shape[-1])
        out[query] = torch.einsum("hk,khe->he", scores.softmax(-1), v[keys])
        normalisers[:, query] = scores.logsumexp(-1)
    return out.to(call["query"].dtype), normalisers.float()


def _backward(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v. Autograd is off inside an operator, so the softmax is differentiated here."""
    q, k, v = _doubles(call)
    upstream = call["grad_out"].double()
    of_q, of_k, of_v = (torch.zeros_like(x) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    for query, keys in _visible(call):
        weights = (torch.einsum("he,khe->hk", q[query], k[keys]) * scale).softmax(-1)
        of_weights = torch.einsum("he,khe->hk", upstream[query], v[keys])
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        of_q[query] = torch.einsum("hk,khe->he", of_scores, k[keys])
        of_k[keys] += torch.einsum("hk,he->khe", of_scores, q[query])
        of_v[keys] += torch.einsum("hk,he->khe", weights, upstream[query])
    kv_heads = call["key"].shape[1]
    of_k, of_v = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (of_k, of_v))
    return tuple(x.to(call["query"].dtype) for x in (of_q, of_k, of_v))
