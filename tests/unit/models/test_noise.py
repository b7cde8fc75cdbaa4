"""Tests of NEFTune's noise: transformers' formula on the same draws, its distribution, and the same in all layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import assert_same_training, config, train
from tidewheel.models.blocks.embedding import Embedding
from tidewheel.models.noise import EmbeddingNoise, unit_noise

ROWS = np.arange(4)


def noise(segments: np.ndarray, rows: np.ndarray = ROWS, step: int = 3, seed: int = 7) -> EmbeddingNoise:
    return EmbeddingNoise.of(segments, rows, step, alpha=5.0, dim=32, seed=seed)


def test_rows_of_one_document_get_the_noise_of_transformers(monkeypatch: pytest.MonkeyPatch):
    from transformers.integrations.neftune import neftune_post_forward_hook

    embedding = Embedding(50, 32)
    tokens = torch.randint(0, 50, (4, 20), generator=torch.Generator().manual_seed(0))
    drawn = noise(np.zeros((4, 20), dtype=np.int32))
    unit = unit_noise(drawn.keys, 32)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: unit * high)
    oracle = nn.Embedding(50, 32, _weight=embedding.weight)
    oracle.neftune_noise_alpha = 5.0
    oracle.register_forward_hook(neftune_post_forward_hook)
    difference = embedding(tokens, None, drawn) - oracle(tokens)
    assert difference.abs().max() < 1e-6
    assert (oracle(tokens) - embedding(tokens)).abs().max() > 0.1


def test_each_document_has_a_scale_of_its_own_and_padding_none():
    segments = np.array([[0] * 4 + [1] * 9 + [-1] * 3, [0] * 16])
    scales = noise(segments, ROWS[:2]).scales.numpy()
    expected = 5 / np.sqrt(np.array([[4] * 4 + [9] * 9, [16] * 13]) * 32)
    assert np.allclose(scales[:, :13], expected)
    assert not scales[0, 13:].any()


def test_values_are_uniform_and_without_correlation():
    values = unit_noise(noise(np.zeros((4, 256), dtype=np.int32)).keys, 64).flatten().double().numpy()
    assert values.min() >= -1
    assert values.max() < 1
    counts = np.histogram(values, bins=64, range=(-1, 1))[0]
    expected = len(values) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 130  # chi-squared of 63 degrees: 1 in 1e6 is above 132
    for lag in (1, 2, 64, 256 * 64):  # standard deviation of a correlation: 1 / 256
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / 256


def test_the_noise_depends_on_seed_step_row_and_column_alone():
    segments = np.zeros((4, 8), dtype=np.int32)
    whole = noise(segments).keys
    assert torch.equal(noise(segments[1:3], ROWS[1:3]).keys, whole[1:3])
    assert torch.equal(noise(segments[:, :5]).keys, whole[:, :5])
    others = torch.cat([noise(segments, step=4).keys, noise(segments, seed=8).keys, noise(segments, ROWS + 4).keys])
    assert len(torch.cat([whole, others]).unique()) == 4 * 32


def on_layouts() -> None:
    for layout in ({"tensor": 2, "context": 2}, {"pipeline": 2, "tensor": 2}, {"data": "zero3"}):
        assert_same_training(config(layout, neftune_alpha=5.0), steps=1, sources=2)


def test_every_layout_adds_the_same_noise_and_reports_the_same_losses_by_source():
    _, (loss, *_) = train(config({}), 1, 1)
    _, (noisy, *_) = train(config({}, neftune_alpha=5.0), 1, 1)
    assert abs(noisy.loss - loss.loss) > 1e-3
    on_ranks(4, on_layouts)
