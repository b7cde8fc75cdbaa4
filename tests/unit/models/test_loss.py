"""Tests of the loss in chunks against the loss of whole logits: values, gradients, z-loss, memory."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from tidewheel.models import loss as loss_module
from tidewheel.models.config import LossConfig
from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter
from tidewheel.models.loss import (
    IGNORED,
    WHOLE_BYTES,
    TokenLoss,
    add_product,
    chunk_rows,
    cross_entropy,
    linear_cross_entropy,
    soft_capped,
    sums_in_fp32,
    token_gradients,
)
from tidewheel.models.row_losses import RowLosses

N, D, V = 37, 16, 50


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::5] = IGNORED
    return x, weight, targets


def value_and_gradients(loss: torch.Tensor, *leaves: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


@pytest.mark.parametrize("rows", [1, 8, 36, 64])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_loss_in_chunks_equals_the_loss_of_whole_logits(rows: int, z_loss: float):
    x, weight, targets = inputs()
    whole = value_and_gradients(cross_entropy(x @ weight.T, targets, z_loss), x, weight, scale=3.0)
    chunked = value_and_gradients(linear_cross_entropy(x, weight, targets, rows=rows, z_loss=z_loss), x, weight,
                                  scale=3.0)
    for ours, expected in zip(chunked, whole):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [0, 8])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_losses_of_rows_are_those_of_torch_and_change_nothing(chunk_tokens: int, cap: float | None):
    x, weight, targets = inputs()
    x, targets = x[:36].detach().requires_grad_(), targets[:36]

    def logits(values: torch.Tensor) -> torch.Tensor:
        return soft_capped(values @ weight.T, cap)

    def value_with(rows: RowLosses | None) -> list[torch.Tensor]:
        module = TokenLoss(LossConfig(chunk_tokens=chunk_tokens, z_loss=0.01), cap)
        module.rows = rows
        return value_and_gradients(module(x.view(4, 9, D), logits, weight, targets.view(4, 9)), x, weight)

    rows = RowLosses()
    for ours, expected in zip(value_with(rows), value_with(None)):
        assert torch.equal(ours, expected)
    expected = F.cross_entropy(logits(x), targets, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(rows.take(4), expected.double().view(4, 9).sum(dim=1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_loss_of_soft_capped_logits_in_chunks_equals_that_of_whole_logits(z_loss: float):
    x, weight, targets = inputs()
    capped = 3.0 * torch.tanh(x @ weight.T / 3.0)
    whole = value_and_gradients(cross_entropy(capped, targets, z_loss), x, weight)
    loss = linear_cross_entropy(x, weight, targets, rows=8, z_loss=z_loss, soft_cap=3.0)
    for ours, expected in zip(value_and_gradients(loss, x, weight), whole):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets, rows=8, soft_cap=3.0),
                                   cross_entropy(capped, targets))


def test_z_loss_is_the_square_of_the_normaliser_and_is_not_reported():
    x, weight, targets = inputs()
    logits = x @ weight.T
    known = targets != IGNORED
    plain = F.cross_entropy(logits[known], targets[known], reduction="sum")
    expected = torch.autograd.grad(plain + 0.01 * logits.logsumexp(-1)[known].square().sum(), (x, weight))
    loss = cross_entropy(x @ weight.T, targets, 0.01)
    torch.testing.assert_close(loss.detach(), plain.detach())
    for ours, theirs in zip(torch.autograd.grad(loss, (x, weight)), expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_the_softmax_of_16_bit_logits_is_fp32(dtype: torch.dtype, tolerance: float):
    x, weight, targets = inputs(dtype)
    exact = value_and_gradients(cross_entropy(x.float() @ weight.float().T, targets), x, weight)
    result = value_and_gradients(linear_cross_entropy(x, weight, targets, rows=8), x, weight)
    assert result[0].dtype == torch.float32
    torch.testing.assert_close(result[0], exact[0], rtol=tolerance, atol=tolerance)
    for ours, expected in zip(result[1:], exact[1:]):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), expected.float(), rtol=tolerance, atol=10 * tolerance)


def test_under_autocast_the_gradient_of_the_weight_is_summed_in_fp32():
    x, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, rows=4)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        whole = cross_entropy(F.linear(x, weight), targets)
    torch.testing.assert_close(loss, whole, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, weight)[0], rtol=0.05, atol=0.1)


def test_fp16_gradients_survive_with_a_loss_scale():
    """With such small hidden states the gradient of the weight underflows in fp16 without a loss scale."""
    x, weight, targets = inputs(torch.float16)
    small = (x.detach() * 1e-4).requires_grad_()
    exact = torch.autograd.grad(cross_entropy(small.float() @ weight.float().T, targets), weight)[0].float() * 2.0**12
    (found,) = torch.autograd.grad(linear_cross_entropy(small, weight, targets, rows=8) * 2.0**12, weight)
    assert ((found.float() - exact).norm() / exact.norm()).item() < 0.01


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        out = function(*arguments, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("tied", [True, False])
def test_whole_logits_never_exist(tied: bool):
    """With a vocabulary far above the width, no tensor is as large as the logits of two chunks."""
    config = Llama(dim=16, num_layers=1, num_heads=2, ffn_dim=32, tie_embeddings=tied)
    vocabulary, tokens = 512, torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    positions, segments = torch.arange(64).expand(2, 64), torch.zeros(2, 64, dtype=torch.int64)
    results = {}
    for chunk in (0, 16):
        model = Decoder(config, vocabulary, LossConfig(chunk_tokens=chunk))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(init_parameter(name, parameter.shape, config, 0))
        with Largest() as largest:
            loss = model(tokens, positions, segments, tokens)
            loss.backward()
        results[chunk] = largest.elements, loss.detach(), model.embedding.weight.grad
    assert results[0][0] >= 128 * vocabulary
    assert results[16][0] <= 2 * 16 * vocabulary
    torch.testing.assert_close(results[16][1], results[0][1], rtol=1e-6, atol=0)
    torch.testing.assert_close(results[16][2], results[0][2], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_gradients_only_the_value_is_computed():
    x, weight, targets = inputs()
    torch.testing.assert_close(linear_cross_entropy(x, weight, targets, rows=8), cross_entropy(x @ weight.T, targets))


def test_small_logits_stay_whole_and_chunks_are_even():
    assert chunk_rows(2048, 4096, None) == 2048
    assert chunk_rows(2048, 4096, 0) == 2048
    assert chunk_rows(100, 50, 40) == 34, "three chunks, not two and a rest"
    assert WHOLE_BYTES < 32768 * 128_256 * 4
    assert chunk_rows(32768, 128_256, None) == 4096
    assert chunk_rows(32768, 128_256, None, torch.device("cuda")) == 8192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_compiled_gradients_have_the_same_bits_without_a_scatter(dtype: torch.dtype, z_loss: float):
    """A scatter in compiled code writes its target to memory: an fp32 buffer of the size of the logits."""
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(token_gradients, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    x, weight, targets = inputs(dtype)
    logits = (x @ weight.T).detach()
    found, expected = compiled(logits, targets, z_loss), token_gradients(logits, targets, z_loss)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    (graph,) = graphs
    assert "aten.exp" in graph.code
    assert "scatter" not in graph.code


@pytest.fixture
def sums_on_cpu():
    """The operator that CUDA has: fp32 matrix + 16-bit product, rounded once."""
    calls = []

    def addmm(self, mat1, mat2, out_dtype, *, beta=1, alpha=1, out):
        assert out_dtype == self.dtype == out.dtype == torch.float32
        assert (beta, alpha) == (1, 1)
        calls.append(mat1.dtype)
        return out.copy_(self.double() + mat1.double() @ mat2.double())

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    sums_in_fp32.cache_clear()
    yield calls
    library._destroy()
    sums_in_fp32.cache_clear()


def test_without_the_operator_chunks_are_rounded_to_16_bits():
    sums_in_fp32.cache_clear()
    assert not sums_in_fp32(torch.device("cpu"), torch.bfloat16)
    total, a, b = torch.ones(3, 5), torch.randn(4, 3).bfloat16(), torch.randn(4, 5).bfloat16()
    add_product(total, a, b)
    assert torch.equal(total, 1 + (a.T @ b).float())


def test_with_the_operator_the_weight_gradient_is_added_in_fp32(sums_on_cpu: list):
    assert sums_in_fp32(torch.device("cpu"), torch.bfloat16)
    x, weight, targets = inputs(torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, rows=4)
    (found,) = torch.autograd.grad(loss, weight)
    assert len(sums_on_cpu) == 1 + 10, "the trial, and one call for each chunk"
    _, gradient = token_gradients(F.linear(x, weight.bfloat16()).detach(), targets, 0.0)
    exact = gradient.double().T @ x.double()
    assert ((found - exact).abs().max() / exact.abs().max()).item() < 1e-6
    assert found.dtype == torch.float32


def test_a_device_that_adds_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss_module.torch, "addmm", lambda total, *_, **__: total)
    sums_in_fp32.cache_clear()
    assert not sums_in_fp32(torch.device("cpu"), torch.bfloat16)
    sums_in_fp32.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_adds_16_bit_products_in_fp32():
    device = torch.device("cuda")
    assert sums_in_fp32(device, torch.bfloat16)
    total, a, b = (torch.randn(shape, device=device) for shape in ((300, 64), (500, 300), (500, 64)))
    expected = total.double() + a.bfloat16().double().T @ b.bfloat16().double()
    add_product(total, a.bfloat16(), b.bfloat16())
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fused_gradients_on_a_gpu():
    """Compare compiled gradients with those of the whole loss, in bf16 under autocast."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 64, generator=generator).cuda().requires_grad_()
    weight = torch.randn(1000, 64, generator=generator).cuda().requires_grad_()
    targets = torch.randint(0, 1000, (600,), generator=generator).cuda()
    targets[::7] = IGNORED
    with torch.autocast("cuda", torch.bfloat16):
        whole = value_and_gradients(cross_entropy(F.linear(x, weight), targets, 0.01), x, weight)
        chunked = value_and_gradients(linear_cross_entropy(x, weight, targets, rows=200, z_loss=0.01), x, weight)
    torch.testing.assert_close(chunked[0], whole[0], rtol=1e-3, atol=0)
    for ours, expected in zip(chunked[1:], whole[1:]):
        assert ours.dtype == torch.float32
        assert ((ours - expected).norm() / expected.norm()).item() < 0.02
