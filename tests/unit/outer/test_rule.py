"""Tests of the outer step against torch.optim.SGD with Nesterov momentum."""

import pytest
import torch

from tidewheel.outer.rule import mean, outer_step


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_the_outer_step_is_torchs_sgd_with_nesterov_momentum(rate: float, momentum: float):
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(5, 7, generator=generator), torch.randn(9, generator=generator)]
    theirs = [torch.nn.Parameter(weight.clone()) for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in weights] if momentum else []
    oracle = torch.optim.SGD(theirs, lr=rate, momentum=momentum, nesterov=momentum > 0)
    for _ in range(6):
        members = [[0.1 * torch.randn(weight.shape, generator=generator) for weight in weights] for _ in range(3)]
        for parameter, *gradients in zip(theirs, *members):
            parameter.grad = (gradients[0] + gradients[1] + gradients[2]) / 3
        oracle.step()
        outer_step(weights, momenta, mean(members), learning_rate=rate, momentum=momentum)
    for weight, parameter in zip(weights, theirs):
        torch.testing.assert_close(weight, parameter.detach(), rtol=0, atol=2e-7)


def test_the_bits_do_not_depend_on_the_part_that_a_rank_has():
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(3, 101, generator=generator) for _ in range(3)]
    parts = [[tensor[:, start:start + 13].clone() for tensor in whole] for start in range(0, 101, 13)]
    outer_step(whole[:1], whole[1:2], mean([whole[2:]] * 3), learning_rate=0.7, momentum=0.9)
    for part in parts:
        outer_step(part[:1], part[1:2], mean([part[2:]] * 3), learning_rate=0.7, momentum=0.9)
    for index in (0, 1):
        assert torch.equal(torch.cat([part[index] for part in parts], dim=1), whole[index])


def test_the_mean_of_one_is_the_one():
    value = torch.tensor([0.1, -1e-30, 3e7])
    assert torch.equal(mean([[value]])[0], value)
    assert mean([[], []]) == []
