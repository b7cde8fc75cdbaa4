"""Tests of every attention kernel against attention computed document by document."""

import contextlib
import dataclasses
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from tidewheel.errors import ConfigError
from tidewheel.models import attention
from tidewheel.models.attention import choose_kernel, document_attention, document_mask, document_offsets
from tidewheel.models.families import Llama
from tidewheel.models.rope import rope_table


def segments_of(*rows: list[int], padding: int = 0) -> torch.Tensor:
    """Return segment ids [B, L] for document lengths per row, with padding at the end of the first row."""
    ids = [[number for number, length in enumerate(row) for _ in range(length)] for row in rows]
    ids[0][len(ids[0]) - padding:] = [-1] * padding
    return torch.tensor(ids)


def brute_force(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Compute attention one query at a time, over the earlier keys of its document."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            for place in range(q.shape[2]):
                seen = [other for other in range(place + 1) if segments[row, other] == segments[row, place]]
                scores = k[row, head // group, seen] @ q[row, head, place] / math.sqrt(q.shape[-1])
                out[row, head, place] = torch.softmax(scores, 0) @ v[row, head // group, seen]
    return out


def tensors(rows: int, length: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, count, length, 8, generator=generator) for count in (heads, kv_heads, kv_heads)]


def flash_by_documents(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
    """Compute what varlen_attn does on any device: causal attention inside each document of [T, H, E]."""
    assert window_size == (-1, 0)
    assert cu_q.dtype == torch.int32
    assert int(cu_q.diff().max()) <= max_q
    parts = [F.scaled_dot_product_attention(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True,
                                            enable_gqa=enable_gqa)[0].transpose(0, 1)
             for a, b in itertools.pairwise(cu_q.tolist())]
    return torch.cat(parts)


@contextlib.contextmanager
def fresh_flash():
    """Clear the cached kernel before and after the test."""
    attention._flash.cache_clear()
    yield
    attention._flash.cache_clear()


@st.composite
def packed_rows(draw):
    length = draw(st.integers(2, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted({0, length, *draw(st.lists(st.integers(1, length - 1), max_size=4))})
        rows.append([b - a for a, b in itertools.pairwise(cuts)])
    return segments_of(*rows, padding=draw(st.integers(0, length - 1)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=10, deadline=None)
@given(segments=packed_rows(), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]), seed=st.integers(0, 99))
def test_every_kernel_equals_attention_computed_per_document(segments: torch.Tensor, heads: tuple[int, int], seed: int):
    q, k, v = tensors(*segments.shape, *heads, seed)
    expected = brute_force(q, k, v, segments)
    for kernel in ("masked", "flex", "varlen"):
        with (mock.patch("torch.nn.attention.varlen.varlen_attn", flash_by_documents), fresh_flash(), torch.no_grad(),
              mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)):  # or seconds a shape
            out = document_attention(q, k, v, document_mask(segments, kernel))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5, msg=lambda text, of=kernel: f"{of}: {text}")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["masked", "flex"])
@torch.no_grad()
def test_a_slice_of_the_queries_attends_to_keys_in_any_order(kernel: str):
    """Queries are chunks of this context rank; keys come in the order of ranks."""
    segments = segments_of([5, 7, 4], [16], padding=2)
    q, k, v = tensors(2, 16, 4, 2, 0)
    expected = brute_force(q, k, v, segments)
    positions = torch.tensor([2, 3, 12, 13])
    gathered = torch.tensor([0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9])
    mask = document_mask(segments[:, positions], kernel, places=positions, key_segments=segments[:, gathered],
                         key_places=gathered)
    out = document_attention(q[:, :, positions], k[:, :, gathered], v[:, :, gathered], mask)
    torch.testing.assert_close(out, expected[:, :, positions], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_bf16_attention_on_cpu_is_close_to_fp32():
    segments = segments_of([5, 11], [9, 7], padding=3)
    q, k, v = (x.bfloat16() for x in tensors(2, 16, 4, 2, 1))
    out = document_attention(q, k, v, document_mask(segments))
    assert out.dtype == torch.bfloat16
    exact = brute_force(q.float(), k.float(), v.float(), segments)
    torch.testing.assert_close(out.float(), exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("kernel", "device"), [("masked", "cpu"), ("flex", "cpu"), ("varlen", "meta")])
@torch.no_grad()
def test_a_block_compiles_in_one_piece_with_every_kernel(kernel: str, device: str):
    """The real varlen operator runs on the meta device, which checks its arguments and shapes."""
    config = Llama(dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=32)
    with torch.device(device):
        block, x = config.block(), torch.zeros(2, 16, 32)
        rope = rope_table(torch.arange(16).expand(2, 16), 8, 1e4)
    for parameter in block.parameters():
        parameter.fill_(0.1)
    segments = segments_of([5, 11], [9, 7])
    mask = document_mask(segments, kernel)
    if mask.offsets is not None:
        mask = dataclasses.replace(mask, offsets=mask.offsets.to(device))
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert compiled(x, rope, mask).shape == x.shape
    if device == "cpu":
        torch.testing.assert_close(compiled(x, rope, mask), block(x, rope, mask))


def test_document_offsets_are_the_starts_of_documents():
    segments = segments_of([3, 2, 3], [8], padding=1)
    assert document_offsets(segments).tolist() == [0, 3, 5, 7, 8, 16]


def test_the_chosen_kernel_fits_device_and_precision():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_kernel("auto", cpu, torch.bfloat16) == "masked"
    assert choose_kernel("auto", cuda, torch.bfloat16) == "varlen"
    assert choose_kernel("auto", cuda, torch.float32) == "flex"
    assert choose_kernel("auto", cuda, torch.bfloat16, whole=False) == "flex"
    assert choose_kernel("flex", cpu, torch.float32) == "flex"
    with pytest.raises(ConfigError, match="varlen attention needs CUDA"):
        choose_kernel("varlen", cuda, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kernel", "dtype"), [("flex", torch.bfloat16), ("flex", torch.float32),
                                               ("varlen", torch.bfloat16)])
def test_gpu_kernels_equal_the_masked_kernel(kernel: str, dtype: torch.dtype):
    segments = segments_of([100, 200, 84], [384], padding=20).cuda()
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, heads, 384, 64, generator=generator).cuda().to(dtype).requires_grad_()
              for heads in (4, 2, 2)]
    upstream = torch.randn(2, 4, 384, 64, generator=generator).cuda().to(dtype)
    found = []
    for each in ("masked", kernel):
        out = document_attention(*leaves, document_mask(segments, each))
        found.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for ours, exact in zip(found[1], found[0]):
        torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)
