"""AdamW with 8-bit moments on a CPU beside torchao's own update."""

from __future__ import annotations

import pytest
import torch
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

from tidewheel.train.optimizers.rules import adamw8bit
from tidewheel.train.optimizers.rules.host_adamw8bit import bounds, codes_of


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos(signed: bool):
    """At random, at the values of all codes, at the bounds, and at the fp32 values next to them."""
    table = OptimState8bit.zeros((256,), signed, 256).qmap
    limits = bounds(signed)
    near = [torch.nextafter(limits, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    random = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values = torch.cat([random, random * 1e-4, table, limits, *near, (table[:-1] + table[1:]) / 2, torch.zeros(1)])
    codes = codes_of(values, limits).to(torch.uint8)
    assert torch.equal(codes, quantize_8bit_with_qmap(values, table))


def test_an_update_is_torchaos():
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in ((600, 512), (64, 256), (512,), (0, 256))]
    ours, theirs = [[torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    mine, its = adamw8bit.AdamW8bit(ours, **settings), TorchaoAdamW8bit(theirs, **settings)
    mine.prepare()
    for _ in range(3):
        for one, other, start in zip(ours, theirs, starts):
            one.grad = torch.randn(start.shape, generator=generator)
            other.grad = one.grad.clone()
        mine.step()
        with torch.compiler.set_stance("force_eager"):
            its.step()
    for one, other in zip(ours[:2], theirs):
        assert torch.equal(one, other)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine.state[one][name].codes, its.state[other][name].codes)
            assert torch.equal(mine.state[one][name].scale, its.state[other][name].scale)
    assert torch.equal(ours[2], theirs[2])
