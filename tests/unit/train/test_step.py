"""Tests of the optimizer step: accumulation, clipping, learning."""

import pytest
import torch

from tidewheel.models.decoder import next_tokens
from tidewheel.models.families import Llama
from tidewheel.train import optimizers, parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, StepResult, train_step

VOCABULARY, LENGTH = 32, 16
MODEL = Llama(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, init_std=0.1)


def rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Return tokens, positions and segment ids of rows with documents of different lengths, every third one padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    cut = torch.randint(2, LENGTH - 2, (count, 1), generator=generator)
    row_positions = torch.arange(LENGTH)[None]
    segments = (row_positions >= cut).long()
    segments[::3, -3:] = -1
    return [tokens, torch.where(row_positions >= cut, row_positions - cut, row_positions), segments]


def micro(parts: list[torch.Tensor], begin: int, end: int, virtual_rank: int) -> MicroBatch:
    tokens, positions, segments = (part[begin:end] for part in parts)
    targets = next_tokens(tokens, segments)
    return MicroBatch(tokens, positions, segments, targets, virtual_rank, int((segments >= 0).sum()),
                      int((targets >= 0).sum()))


def fresh(config: optimizers.AdamW = optimizers.AdamW()):  # noqa: B008
    model = parallel.build(TrainConfig(model=MODEL), VOCABULARY, Runtime())
    parallel.init_weights(model, 3)
    return model, build_optimizer(model, config), Collectives(Runtime())


def step(batches: list[MicroBatch], clip_norm: float = 0.0, steps: int = 1):
    model, adamw, collectives = fresh()
    result: StepResult | None = None
    for _ in range(steps):
        result = train_step(model, adamw, batches, collectives, virtual_ranks=2, clip_norm=clip_norm)
    return model, result


def test_accumulated_micro_batches_equal_one_large_batch():
    """Rows have different numbers of targets, so a mean of means would differ."""
    parts = rows(8)
    whole, a = step([micro(parts, 0, 8, 0)])
    pieces, b = step([micro(parts, i, i + 2, i // 4) for i in range(0, 8, 2)])
    assert (a.tokens, a.targets) == (b.tokens, b.targets)
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-5)
    for one, other in zip(whole.parameters(), pieces.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_the_gradient_belongs_to_the_mean_loss_per_target():
    parts = rows(4)
    batch = micro(parts, 0, 4, 0)
    stepped, result = step([batch])
    model, _, _ = fresh()
    logits = model.parts[0](batch.tokens, batch.positions, batch.segment_ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert result.gradient_norm == pytest.approx(expected.item(), rel=1e-4)
    for one, other in zip(stepped.parameters(), model.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_clipping_bounds_the_gradient():
    parts = rows(4)
    free, before = step([micro(parts, 0, 4, 0)])
    model, result = step([micro(parts, 0, 4, 0)], clip_norm=before.gradient_norm / 4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm.item() == pytest.approx(before.gradient_norm / 4, rel=1e-4)
    assert result.gradient_norm == pytest.approx(before.gradient_norm), "the norm before clipping is reported"
    for one, other in zip(free.parameters(), model.parameters()):
        torch.testing.assert_close(one.grad / 4, other.grad, rtol=1e-4, atol=1e-7)


def test_a_tiny_batch_is_memorised():
    _, result = step([micro(rows(2), 0, 2, 0)], clip_norm=1.0, steps=150)
    assert result.loss < 0.05


def test_the_state_names_every_tensor_once():
    model, adamw, _ = fresh()
    state = training_state(model, adamw)
    names = [name for name, _ in model.named_parameters()]
    assert list(state["model"]) == names
    assert set(state["optimizer"]) == {"step", *(f"{name}.{moment}" for name in names
                                                 for moment in ("exp_avg", "exp_avg_sq"))}
    assert all(isinstance(t, torch.Tensor) for group in state.values() for t in group.values())
