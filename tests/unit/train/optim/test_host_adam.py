"""Adam of offloaded parameters: as torch's, and the same bits however parameters are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tidewheel.train.optim.base import allocate
from tidewheel.train.optimizers.rules.host_adam import HostAdam, HostAdamW, is_offloaded

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
COUNT = 15 * 4000


def updated(kind: type[torch.optim.Optimizer], cut: int, steps: int = 4, **settings: Any) -> list[torch.Tensor]:
    """Return parameter and moments, whole, after steps of an optimizer that has them in pieces of `cut` elements."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(COUNT, generator=generator)
    pieces = [torch.nn.Parameter(piece.clone()) for piece in whole.split(cut)]
    optimizer = allocate(kind(pieces, **SETTINGS, **settings), ("step", "exp_avg", "exp_avg_sq"))
    for _ in range(steps):
        for piece, gradient in zip(pieces, torch.randn(COUNT, generator=generator).split(cut)):
            piece.grad = gradient
        optimizer.step()
    moments = [[optimizer.state[piece][name] for piece in pieces] for name in ("exp_avg", "exp_avg_sq")]
    return [torch.cat([piece.detach() for piece in pieces]), *map(torch.cat, moments)]


@pytest.mark.parametrize(("ours", "torchs"), [(HostAdam, torch.optim.Adam), (HostAdamW, torch.optim.AdamW)])
def test_as_torchs_kernel_where_vectors_are_whole(ours: type[torch.optim.Optimizer],
                                                  torchs: type[torch.optim.Optimizer]):
    for mine, its in zip(updated(ours, COUNT), updated(torchs, COUNT, fused=True)):
        assert torch.equal(mine, its)
    for mine, its in zip(updated(ours, COUNT), updated(torchs, COUNT, foreach=True)):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [15, 100, 4001])
def test_shards_do_not_change_a_bit(cut: int):
    for whole, pieces in zip(updated(HostAdamW, COUNT), updated(HostAdamW, cut)):
        assert torch.equal(whole, pieces)


def test_torchs_kernel_alone_depends_on_the_shards():
    """The control: without whole vectors the bits differ, which is why there is a copy."""
    wholes, pieces = updated(torch.optim.AdamW, COUNT, fused=True), updated(torch.optim.AdamW, 15, fused=True)
    assert any(not torch.equal(whole, piece) for whole, piece in zip(wholes, pieces))


def test_parameters_without_a_gradient_and_empty_ones_stay():
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (16, 3, 0)]
    optimizer = allocate(HostAdamW(parameters, **SETTINGS), ("step", "exp_avg", "exp_avg_sq"))
    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(parameters[0], torch.ones(16))
    assert [int(optimizer.state[parameter]["step"]) for parameter in parameters] == [0, 1, 1]
    assert not torch.equal(parameters[1], torch.ones(3))


def test_columns_of_a_matrix_are_updated_in_place():
    whole = torch.arange(64.0).view(8, 8)
    expected = torch.nn.Parameter(whole[:, :4].clone())
    columns = torch.nn.Parameter(whole[:, :4])
    for parameter in (columns, expected):
        parameter.grad = torch.ones(8, 4)
        allocate(HostAdamW([parameter], **SETTINGS), ("step", "exp_avg", "exp_avg_sq")).step()
    assert torch.equal(whole[:, :4], expected.detach())
    assert torch.equal(whole[:, 4:], torch.arange(64.0).view(8, 8)[:, 4:])


def test_parameters_on_their_own_device_are_not_offloaded():
    assert not is_offloaded([{"params": [torch.nn.Parameter(torch.ones(3))]}])
