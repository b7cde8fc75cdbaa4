"""Load balancing: the losses against transformers and autograd, and the bias's update against its definition."""

from __future__ import annotations

import torch

from tests.unit.models.moe.test_layer import TOKENS, inputs, layer
from tidewheel.models.moe.balance import auxiliary_loss, moved_bias, with_loss, z_loss


def test_auxiliary_loss_is_that_of_transformers_times_tokens_over_experts_per_token():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = torch.randn(200, 8)
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=8)
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=2)
    ours = auxiliary_loss(logits.softmax(dim=-1), counts, 0.5)
    torch.testing.assert_close(ours, 0.5 * theirs * 200 / 2)


def test_losses_add_their_gradients_and_leave_the_output_alone():
    plain = layer(balancing="none")
    both = layer(balancing="auxiliary", auxiliary_loss=0.3, router_z_loss=0.02)
    both.router.loss_scale = 4.0
    x = inputs()
    out, routing = plain(x)
    sent = torch.randn_like(out)
    (reference,) = torch.autograd.grad(out, plain.router.weight, sent)
    logits = x.flatten(0, 1) @ plain.router.weight.t()
    loss = auxiliary_loss(logits.softmax(dim=-1), routing.counts, 0.3) + z_loss(logits, 0.02)
    (added,) = torch.autograd.grad(loss, plain.router.weight)
    same, _ = both(x)
    (gradient,) = torch.autograd.grad(same, both.router.weight, sent)
    assert torch.equal(same, out)
    assert added.abs().max() > 1e-3
    torch.testing.assert_close(gradient, reference + 4.0 * added, rtol=1e-4, atol=1e-5)


def test_z_loss_is_the_squared_log_normaliser():
    logits = torch.randn(5, 3)
    torch.testing.assert_close(z_loss(logits, 2.0), 2.0 * logits.exp().sum(dim=1).log().square().sum())


def test_losses_of_parts_of_a_micro_batch_add_up_if_counts_are_whole():
    module = layer(balancing="auxiliary", auxiliary_loss=0.3)
    x = inputs()
    _, routing = module(x)

    def gradient(rows: torch.Tensor) -> torch.Tensor:
        out, _ = module(rows)
        (value,) = torch.autograd.grad(out, module.router.weight, torch.ones_like(out))
        return value

    whole = gradient(x)
    module.router.sum_counts = lambda counts: routing.counts
    parts = gradient(x[:1]) + gradient(x[1:])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_with_loss_scales_by_a_tensor():
    values = torch.zeros(2, requires_grad=True)
    weight = torch.tensor(3.0, requires_grad=True)
    out = with_loss(values, weight.square(), torch.tensor(0.5))
    out.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0]
    assert weight.grad is not None
    assert weight.grad.item() == 3.0


def test_bias_moves_against_the_load_and_keeps_its_mean():
    bias = torch.zeros(2, 4)
    counts = torch.tensor([[10, 2, 4, 4], [5, 5, 5, 5]])
    moved = moved_bias(bias, counts, 0.1)
    step = torch.tensor([-0.1, 0.1, 0.1, 0.1])
    torch.testing.assert_close(moved, torch.stack([step - step.mean(), torch.zeros(4)]))


def test_bias_balances_a_skewed_router():
    torch.manual_seed(0)
    skew = torch.randn(8)
    bias = torch.zeros(1, 8)
    loads = []
    for _ in range(200):
        scores = (torch.randn(512, 8) + skew).sigmoid() + bias
        counts = torch.bincount(scores.topk(2).indices.flatten(), minlength=8)
        loads.append(counts.double() / counts.double().mean())
        bias = moved_bias(bias, counts[None], 1e-2)
    assert loads[0].max() > 2
    assert torch.stack(loads[-20:]).mean(dim=0).max() < 1.1
    assert abs(float(bias.mean())) < 1e-6


def test_padding_counts_as_tokens():
    module = layer()
    _, routing = module(torch.zeros(1, TOKENS, 64))
    assert int(routing.counts.sum()) == 2 * TOKENS
