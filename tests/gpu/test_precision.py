"""Tests that need a CUDA device: fp8, the fused optimizer, an update skipped without the host."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu import on_gpu
from tests.unit.train.test_step import VOCABULARY, micro, rows
from tidewheel.models.families import Llama
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.precision import fp32_products, native_fp8
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODEL = Llama(dim=64, num_layers=2, num_heads=4, ffn_dim=128)


def losses(precision: str, steps: int = 30, **settings) -> list[float]:
    config, runtime = TrainConfig(model=MODEL, precision=precision, **settings), Runtime(device="cuda")
    model = parallel.build(config, VOCABULARY, runtime)
    parallel.init_weights(model, 3)
    optimizer = build_optimizer(model, config.optimizer)
    optimizer.started()
    batch = micro(rows(4), 0, 4, 0)
    if precision == "fp8":  # by default these small layers would stay bf16
        assert any(type(module).__name__ == "Float8Linear" for module in model.parts[0].modules())
    return [train_step(model, optimizer, [on_gpu(batch)], Collectives(runtime), virtual_ranks=2, clip_norm=1.0,
                       precision=config.precision).loss for _ in range(steps)]


@pytest.mark.parametrize(("precision", "settings"), [
    ("bf16", {}), ("bf16", {"parameters": "bf16"}), ("fp8", {"fp8": {"layers": "all"}}),
    ("fp8", {"fp8": {"layers": "all", "recipe": "tensorwise"}})], ids=str)
def test_low_precision_learns_like_fp32(precision: str, settings: dict[str, Any]):
    if precision == "fp8" and not native_fp8(torch.device("cuda")):
        pytest.skip("no fp8 matrix products on this GPU")
    exact, low = losses("fp32"), losses(precision, **settings)
    assert low[0] == pytest.approx(exact[0], rel=2e-2)
    assert low[-1] < low[0] - 0.5


def test_the_fused_update_is_withheld_on_the_device_and_does_not_depend_on_shards():
    weights = torch.randn(1000, device="cuda")
    gradients = torch.randn(1000, device="cuda")

    class Pieces:
        def __init__(self, cuts: list[int]) -> None:
            self.held = {f"blocks.{i}.norm": nn.Parameter(part.clone()) for i, part in enumerate(weights.split(cuts))}
            for parameter, gradient in zip(self.held.values(), gradients.split(cuts)):
                parameter.grad = gradient.clone()

        def named_parameters(self):
            return self.held.items()

    results = []
    for cuts in ([1000], [333, 333, 334], [1, 999]):
        pieces = Pieces(cuts)
        optimizer = build_optimizer(pieces, TrainConfig().optimizer)
        assert optimizer.skips_on_device
        optimizer.step(skip=torch.ones((), device="cuda"))
        assert torch.equal(torch.cat(list(pieces.held.values())), weights)
        optimizer.step(skip=torch.zeros((), device="cuda"))
        results.append(torch.cat([parameter.detach() for parameter in pieces.held.values()]))
    assert not torch.equal(results[0], weights)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_tf32_rounds_the_operands_and_full_fp32_does_not():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 on this GPU")
    device = torch.device("cuda")
    left, right = torch.randn(512, 512, device=device), torch.randn(512, 512, device=device)
    exact = left.double() @ right.double()
    errors = []
    for tf32 in (True, False):
        with fp32_products(device, tf32):
            errors.append(float(((left @ right) - exact).norm() / exact.norm()))
    assert errors[0] > 1e-4 > 1e-5 > errors[1]
