"""Tests of deterministic kernels on a GPU, on which reproducible mode depends."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import on_gpu
from tests.unit.train.reproducible.test_ranks import HALF, VOCABULARY, Case, digest, micro_batches, settings
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.reproducible import norm
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("changes", [{}, {**HALF, "model": {"attention": "varlen"}},
                                     {**HALF, "model": {"attention": "flex"}},
                                     {**HALF, "loss": {"chunk_tokens": 8}}], ids=["fp32", "varlen", "flex", "chunks"])
def test_training_twice_gives_the_same_bits(changes):
    def once() -> tuple[str, list[str]]:
        shape = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128, "init_std": 0.1}
        case = Case(1, "gpu", {}, {**changes, "model": {**shape, **changes.get("model", {})}})
        config, runtime = settings(case), Runtime(device="cuda")
        model = parallel.build(config, VOCABULARY, runtime)
        parallel.init_weights(model, seed=3)
        optimizer, losses = build_optimizer(model, config.optimizer), []
        for step in range(3):
            micros = [on_gpu(micro) for micro in micro_batches(model, config, step)]
            result = train_step(model, optimizer, micros, Collectives(runtime), precision=config.precision,
                                virtual_ranks=config.batch.virtual_ranks, clip_norm=0.5)
            losses.append(result.loss.hex())
        state = {group: {name: tensor.cpu() for name, tensor in tensors.items()}
                 for group, tensors in training_state(model, optimizer).items()}
        return digest(state), losses

    with deterministic_kernels():
        assert once() == once()


def test_the_norm_does_not_depend_on_how_rows_are_sharded():
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, device="cuda") for shape in ((701, 1000), (3001,), (64, 4096))]
    whole = norm.value(norm.pieces(norm.row_squares(tensors)))
    for ranks in (2, 3, 8):
        shares = [norm.pieces(norm.row_squares([t.chunk(ranks)[rank] for t in tensors])) for rank in range(ranks)]
        assert torch.equal(norm.value(torch.stack(shares).sum(dim=0)), whole)
    assert whole.sqrt().item() == pytest.approx(torch.cat([t.flatten() for t in tensors]).double().norm().item())
