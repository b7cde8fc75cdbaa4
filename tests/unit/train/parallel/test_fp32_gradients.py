"""Gradients of bf16 parameters are summed in fp32 over micro-batches and ranks, in every kind of data parallelism.

With `reduce_dtype: bf16` only the sum over ranks is rounded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tests.unit.train.test_step import MODEL, VOCABULARY, micro, rows
from tidewheel.config import build as build_config
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

MICRO_BATCHES = 16
LAYOUTS = ({"data": "ddp"}, {"data": "zero1"}, {"data": "zero2", "reduce": "step"},
           {"data": "zero2", "reduce": "micro_batch"}, {"data": "zero3", "reduce": "micro_batch"})
TOLERANCE = 2e-5
"""Relative difference of sums in another order. Sums in bf16 differ by about 4e-3."""
def gradients(runtime: Runtime, half: int | None = None, **layout: str) -> tuple[dict[str, torch.Tensor], float]:
    """Return the whole gradients of one step by name, fp32, and the norm that the step reports.

    With `half`, the step has the micro-batches of one of two ranks.
    """
    config = build_config(TrainConfig, {
        "model": MODEL.model_dump(), "precision": "bf16", "parameters": "bf16", "parallel": layout,
        "batch": {"global_sequences": MICRO_BATCHES, "micro_sequences": 1, "virtual_ranks": 2},
        "elastic": {"min_workers": runtime.world_size, "max_workers": runtime.world_size}})
    model = parallel.build(config, VOCABULARY, runtime)
    parallel.init_weights(model, 3)
    share = MICRO_BATCHES // runtime.world_size
    rank_range = range(runtime.rank * share, (runtime.rank + 1) * share)
    if half is not None:
        rank_range = range(half * share // 2, (half + 1) * share // 2)
    parts = rows(MICRO_BATCHES)
    micro_batches = [micro(parts, index, index + 1, 2 * index // MICRO_BATCHES) for index in rank_range]
    optimizer = build_optimizer(model, config.optimizer)
    result = train_step(model, optimizer, micro_batches, Collectives(runtime), virtual_ranks=2, precision="bf16")
    results = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.dtype == torch.float32, f"{layout}: {name}"
        results[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return results, result.gradient_norm


def every_layout_equals_one_process() -> None:
    expected, norm = gradients(Runtime())
    exact = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm().item()
    assert abs(norm / exact - 1) < TOLERANCE
    # in the units of the whole step: each half has about half of its targets, by which gradients are divided
    halves = [{name: gradient / 2 for name, gradient in gradients(Runtime(), half)[0].items()} for half in (0, 1)]
    for layout in LAYOUTS:
        found, found_norm = gradients(Runtime(rank=dist.get_rank(), world_size=dist.get_world_size()), **layout)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            difference = (gradient - expected[name]).norm() / expected[name].norm()
            assert difference < TOLERANCE, f"{layout}: {name}: {difference:.1e}"
        assert abs(found_norm / exact - 1) < TOLERANCE, layout
        only_the_sum_over_ranks_is_rounded(expected, halves, **layout)


def only_the_sum_over_ranks_is_rounded(expected: dict[str, torch.Tensor], halves: list[dict[str, torch.Tensor]],
                                       **layout: str) -> None:
    """With `reduce_dtype: bf16` both addends are rounded by 2^-8 at most, and so is their sum."""
    found, _ = gradients(Runtime(rank=dist.get_rank(), world_size=dist.get_world_size()), **layout, reduce_dtype="bf16")
    for name, gradient in found.items():
        difference = (gradient - expected[name]).abs()
        assert difference.norm() > 1e-4 * expected[name].norm(), f"{layout}: {name} is not rounded"
        if layout.get("reduce") != "micro_batch":  # which rounds the sums of each micro-batch
            bound = 1.1 * 2.0**-7 * (halves[0][name].abs() + halves[1][name].abs())
            bound += TOLERANCE * expected[name].abs().max()
            assert (difference <= bound).all(), f"{layout}: {name}: {(difference / bound).max():.2f} of the bound"
        assert difference.norm() < 6e-3 * expected[name].norm(), f"{layout}: {name}"


def test_every_kind_of_data_parallelism_sums_in_fp32() -> None:
    on_ranks(2, every_layout_equals_one_process)
