"""Tests that legal optimizers give the same bits for any sharding of a parameter."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.train import optimizers

SIZE = 1003
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
@pytest.mark.parametrize("kind", ["adamw", "lion"])
@given(cuts=st.lists(st.integers(0, SIZE), max_size=4), seed=st.integers(0, 10**6))
def test_any_sharding_gives_the_same_bits(device, kind, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, *gradients = (torch.randn(SIZE, generator=generator).to(device) for _ in range(4))

    def updated(bounds: list[int]) -> torch.Tensor:
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        named = [(f"blocks.{number}", torch.nn.Parameter(weight[part].clone())) for number, part in enumerate(parts)]
        [optimizer] = optimizers.KIND.build(kind).build_all(named)
        for gradient in gradients:
            for (_, parameter), part in zip(named, parts):
                parameter.grad = gradient[part].clone()
            optimizer.step()
        return torch.cat([parameter.detach() for _, parameter in named])

    assert torch.equal(updated([0, *sorted(cuts), SIZE]), updated([0, SIZE]))
