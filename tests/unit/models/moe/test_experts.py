"""Experts: grouped products against a loop over experts in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.every import every
from tidewheel.models.moe.experts import Experts, can_group, clamped_swiglu

E, D = 4, 32
COUNTS = torch.tensor([[3, 0, 5, 1]])


def experts(inner: int = 48, **settings) -> Experts:
    torch.manual_seed(0)
    module = Experts(E, D, inner, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def one_by_one(module: Experts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute each expert's rows as an ordinary feed-forward."""
    outputs = []
    parts = rows.split(counts.flatten().tolist())
    for number, part in enumerate(parts):
        expert = number % E
        biases = [None if bias is None else bias[expert] for bias in (module.w1_bias, module.w3_bias, module.w2_bias)]
        gate = F.linear(part, module.w1[expert], biases[0])
        up = F.linear(part, module.w3[expert], biases[1])
        hidden = clamped_swiglu(gate, up) if module.activation == "clamped" else F.silu(gate) * up
        outputs.append(F.linear(hidden, module.w2[expert], biases[2]))
    return torch.cat(outputs)


CASES = {"grouped": {}, "loop, odd strides": {"inner": 13}, "biases": {"bias": True, "activation": "clamped"},
         "biases in a loop": {"inner": 13, "bias": True, "activation": "clamped"}}


@every(CASES)
def test_outputs_and_gradients_are_those_of_separate_feed_forwards(name: str) -> None:
    for counts in (COUNTS, torch.tensor([[0, 0, 4, 0]])):
        module = experts(**CASES[name])
        rows = torch.randn(int(counts.sum()), D, requires_grad=True)
        sent = torch.randn_like(rows)
        wanted = one_by_one(module, rows, counts)
        held = [rows, *module.parameters()]
        reference = torch.autograd.grad(wanted, held, sent)
        out = module(rows, counts)
        gradients = torch.autograd.grad(out, held, sent)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        for gradient, expected in zip(gradients, reference):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@every([48, 13])
def test_an_expert_without_rows_gets_zeros_not_none(inner: int) -> None:
    module = experts(inner, bias=True)
    for counts in (torch.tensor([[0, 6, 0, 0]]), torch.zeros(1, E, dtype=torch.int64)):
        module.zero_grad()
        rows = torch.randn(int(counts.sum()), D, requires_grad=True)
        out = module(rows, counts)
        out.backward(torch.randn_like(out))
        for parameter in module.parameters():
            assert parameter.grad is not None
            assert not parameter.grad[0].any()


def test_autocast_sets_the_dtype_of_the_products():
    module = experts()
    rows = torch.randn(9, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(rows, COUNTS)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert module.w1.grad is not None
    assert module.w1.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), module(rows, COUNTS), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("rows", "width", "dtype", "grouped"), [
    (4, 32, torch.float32, True), (4, 30, torch.float32, False), (4, 20, torch.bfloat16, False),
    (4, 32, torch.float64, False), (0, 32, torch.float32, False)])
def test_when_products_are_grouped(rows, width, dtype, grouped):
    assert can_group(torch.zeros(rows, width, dtype=dtype), torch.zeros(2, 16, width, dtype=dtype)) == grouped
