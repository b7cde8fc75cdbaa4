"""Tests of every attention kernel against attention computed document by document."""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from tests.every import every
from tests.unit.models.varlen_on_cpu import varlen_on_cpu
from tidewheel.models.attention import document_attention, document_mask
from tidewheel.models.attention_kernels import Choice, Machine, choose
from tidewheel.models.config import Rope
from tidewheel.models.documents import Documents
from tidewheel.models.families import Llama
from tidewheel.models.rope import rope_table


def segments_of(*rows: list[int], padding: int = 0) -> torch.Tensor:
    """Return segment ids [B, L] for document lengths per row, with padding at the end of the first row."""
    ids = [[number for number, length in enumerate(row) for _ in range(length)] for row in rows]
    ids[0][len(ids[0]) - padding:] = [-1] * padding
    return torch.tensor(ids)


def brute_force(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, window: int | None = None,
                scale: float | None = None, soft_cap: float | None = None,
                sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Compute attention one query at a time, over the earlier keys of its document that are in the window."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    rows = []
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            for place in range(q.shape[2]):
                seen = [other for other in range(place + 1) if segments[row, other] == segments[row, place]]
                seen = seen[-(window or len(seen)):]  # the tokens of a document are neighbours
                scores = k[row, head // group, seen] @ q[row, head, place] * factor
                scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
                shares = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].exp()))
                rows.append(shares @ v[row, head // group, seen])
    return torch.stack(rows).view(q.shape)


def tensors(rows: int, length: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, count, length, 8, generator=generator) for count in (heads, kv_heads, kv_heads)]


@st.composite
def packed_rows(draw):
    length = draw(st.integers(2, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted({0, length, *draw(st.lists(st.integers(1, length - 1), max_size=4))})
        rows.append([b - a for a, b in itertools.pairwise(cuts)])
    return segments_of(*rows, padding=draw(st.integers(0, length - 1)))


KERNELS = ("masked", "flex", "varlen", "causal")


def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, kernel: str,
            window: int | None, **options: Any) -> torch.Tensor:
    """Compute attention with a kernel on a CPU."""
    uncompiled = mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # or seconds a shape
    with varlen_on_cpu(), uncompiled:
        mask = document_mask(segments, kernel, documents=Documents.of(segments), window=window)
        return document_attention(q, k, v, mask, **options)


SCORES: list[dict[str, Any]] = [{"scale": 0.7}, {"soft_cap": 0.5}, {"sinks": True}, {
    "scale": 0.2, "soft_cap": 2.0, "sinks": True, "window": 4}]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@every([(kernel, options) for kernel in KERNELS for options in SCORES])
def test_soft_capping_sinks_and_a_scale_equal_attention_computed_per_query(case: tuple[str, dict[str, Any]]):
    """Kernels without soft-capping and sinks refuse them."""
    kernel, given = case
    options = {**given}
    window = options.pop("window", None)
    segments = segments_of([13], [13], padding=3) if kernel == "causal" else segments_of([5, 8], [13], padding=3)
    differentiable = kernel != "flex"  # which has no backward pass on a CPU
    leaves = [tensor.requires_grad_(differentiable) for tensor in tensors(2, 13, 4, 2, 5)]
    if "sinks" in options:
        options["sinks"] = torch.tensor([-1.0, 0.0, 1.0, 2.0], requires_grad=differentiable)
        leaves.append(options["sinks"])
    becomes_masked = kernel == "causal" and window is not None
    if kernel in ("varlen", "causal") and {"soft_cap", "sinks"} & set(options) and not becomes_masked:
        with pytest.raises(ValueError, match="use masked or flex"):
            compute(*leaves[:3], segments, kernel, window, **options)
        return
    known = (segments >= 0)[:, None, :, None]
    ours = compute(*leaves[:3], segments, kernel, window, **options) * known
    expected = brute_force(*leaves[:3], segments, window, **options) * known
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    if not differentiable:
        return
    for mine, theirs in zip(torch.autograd.grad(ours.square().sum(), leaves),
                            torch.autograd.grad(expected.square().sum(), leaves)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=12, deadline=None)
@given(segments=packed_rows(), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]), seed=st.integers(0, 99),
       window=st.one_of(st.none(), st.integers(1, 26)))
@torch.no_grad()
def test_every_kernel_equals_attention_computed_per_document(segments: torch.Tensor, heads: tuple[int, int], seed: int,
                                                             window: int | None):
    q, k, v = tensors(*segments.shape, *heads, seed)
    expected = brute_force(q, k, v, segments, window)
    for kernel in KERNELS if Documents.of(segments).whole_rows else KERNELS[:3]:
        out = compute(q, k, v, segments, kernel, window)
        real = segments >= 0 if kernel == "causal" else torch.ones_like(segments, dtype=torch.bool)
        torch.testing.assert_close(out.transpose(1, 2)[real], expected.transpose(1, 2)[real], rtol=1e-4, atol=1e-5,
                                   msg=lambda text, of=kernel: f"{of}: {text}")


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("kernel", ["masked", "varlen", "causal"])
def test_gradients_equal_those_of_attention_computed_per_document(kernel: str, window: int | None):
    """Grouped heads, empty documents at the end of the offsets, padding, and a window."""
    whole = kernel == "causal"
    segments = segments_of([16], [16], padding=3) if whole else segments_of([1, 4, 2, 2, 1, 6], [9, 7], padding=3)
    offsets = Documents.of(segments).offsets.tolist()
    assert whole or (len(offsets) == 11 and offsets[-2:] == [32, 32]), "a document without tokens"
    leaves = [leaf.requires_grad_() for leaf in tensors(2, 16, 4, 2, 3)]
    upstream = tensors(2, 16, 4, 2, 4)[0] * (segments >= 0)[:, None, :, None]  # padding has no loss
    out = compute(*leaves, segments, kernel, window)
    expected = brute_force(*leaves, segments, window)
    gradients = torch.autograd.grad((out * upstream).sum(), leaves)
    for ours, exact in zip(gradients, torch.autograd.grad((expected * upstream).sum(), leaves)):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "asked"), [(None, (-1, 0)), (1, (0, 0)), (5, (4, 0)), (16, (-1, 0))])
@torch.no_grad()
def test_varlen_is_asked_for_a_causal_window(window: int | None, asked: tuple[int, int]):
    segments = segments_of([5, 11], [16])
    with varlen_on_cpu() as calls:
        document_attention(*tensors(2, 16, 4, 2, 0), document_mask(segments, "varlen", window=window))
    assert tuple(calls[0]["window_size"]) == asked
    assert calls[0]["is_causal"] == (asked == (-1, 0))


def test_a_window_has_a_token():
    with pytest.raises(ValueError, match="at least 1"):
        document_mask(segments_of([4]), window=0)


def test_causal_attention_is_refused_for_packed_rows():
    segments = segments_of([2, 2])
    with pytest.raises(ValueError, match="a row has several"):
        document_mask(segments, "causal", documents=Documents.of(segments))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kernel", "window"), [("masked", None), ("flex", None), ("masked", 4), ("flex", 4)])
@torch.no_grad()
def test_a_slice_of_the_queries_attends_to_keys_in_any_order(kernel: str, window: int | None):
    """Queries are chunks of this context rank; keys come in the order of ranks."""
    segments = segments_of([5, 7, 4], [16], padding=2)
    q, k, v = tensors(2, 16, 4, 2, 0)
    expected = brute_force(q, k, v, segments, window)
    mine = torch.tensor([2, 3, 12, 13])
    gathered = torch.tensor([0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9])
    mask = document_mask(segments[:, mine], kernel, places=mine, key_segments=segments[:, gathered],
                         key_places=gathered, window=window)
    out = document_attention(q[:, :, mine], k[:, :, gathered], v[:, :, gathered], mask)
    torch.testing.assert_close(out, expected[:, :, mine], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_bf16_attention_on_cpu_is_close_to_fp32():
    segments = segments_of([5, 11], [9, 7], padding=3)
    q, k, v = (x.bfloat16() for x in tensors(2, 16, 4, 2, 1))
    out = document_attention(q, k, v, document_mask(segments))
    assert out.dtype == torch.bfloat16
    exact = brute_force(q.float(), k.float(), v.float(), segments)
    torch.testing.assert_close(out.float(), exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("kernel", ["masked", "flex", "varlen", "causal"])
def test_a_block_compiles_once_with_every_kernel(kernel: str):
    """Two micro-batches, the second with more and shorter documents, forward and backward: one graph, no break."""
    config = Llama(dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=32)
    length = 160
    block, rope = config.block(0), rope_table(torch.arange(length).expand(2, length), Rope(8, 1e4))
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    packings = [segments_of([length], [length])] * 2 if kernel == "causal" else [
        segments_of([5, 155], [90, 70]), segments_of([10] * 16, [80, 80])]
    torch._dynamo.reset()
    compilations = CompileCounterWithBackend("eager" if kernel == "flex" else "aot_eager")
    compiled = torch.compile(block, backend=compilations, fullgraph=True)
    choice = Choice(kernel, cudnn=kernel == "causal")
    for segments in packings:
        x = torch.randn(2, length, 32, generator=generator, requires_grad=kernel != "flex")
        with varlen_on_cpu(), torch.set_grad_enabled(x.requires_grad):
            mask = document_mask(segments, choice, documents=Documents.of(segments))
            found, expected = compiled(x, rope, mask), block(x, rope, mask)
            torch.testing.assert_close(found, expected)
            if x.requires_grad:
                gradients = [torch.autograd.grad(out.square().sum(), [x, block.attention.wk.weight])
                             for out in (found, expected)]
                torch.testing.assert_close(gradients[0], gradients[1])
    assert kernel == "flex" or compilations.frame_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("kernel", "dtype"), [("flex", torch.bfloat16), ("flex", torch.float32),
                                               ("varlen", torch.bfloat16)])
def test_gpu_kernels_equal_the_masked_kernel(kernel: str, dtype: torch.dtype, window: int | None):
    segments = segments_of([100, 200, 84], [1] * 9 + [375], padding=20).cuda()
    assert_equal_to_masked(Choice(kernel), dtype, segments, window)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cudnn", [False, True])
def test_causal_attention_on_a_gpu_equals_the_masked_kernel(cudnn: bool):
    assert_equal_to_masked(Choice("causal", cudnn=cudnn), torch.bfloat16, segments_of([384], [384]).cuda(), None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_width", [64, 128])
def test_the_implementation_that_this_gpu_gets_equals_the_masked_kernel(head_width: int):
    """FA3, FA4 or cuDNN where it is installed, and torch's own elsewhere."""
    for segments in (segments_of([100, 200, 84], [384]).cuda(), segments_of([384], [384]).cuda()):
        choice = choose("auto", Machine.of(segments.device), torch.bfloat16, head_width,
                        whole_rows=Documents.of(segments).whole_rows)
        assert_equal_to_masked(choice, torch.bfloat16, segments, None, head_width)


def assert_equal_to_masked(kernel: Choice, dtype: torch.dtype, segments: torch.Tensor, window: int | None,
                           head_width: int = 64) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, heads, 384, head_width, generator=generator).cuda().to(dtype).requires_grad_()
              for heads in (4, 2, 2)]
    upstream = torch.randn(2, 4, 384, head_width, generator=generator).cuda().to(dtype)
    results = []
    for item in (Choice("masked"), kernel):
        mask = document_mask(segments, item, documents=Documents.of(segments), window=window)
        out = document_attention(*leaves, mask)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for ours, exact in zip(results[1], results[0]):
        torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)
