"""The estimate of the curvature: its labels, its value, and that it is the same on any number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks import on_ranks
from tests.unit.contrib.test_optimizers import CONTRIB
from tests.unit.train.helpers import VOCABULARY, FileCheckpoints, Script, config, write_shards
from tidewheel.errors import ConfigError
from tidewheel.inference.sample import text_sample
from tidewheel.models.decoder import next_tokens
from tidewheel.train import curvature, parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.curvature import Curvature, draw, random_numbers
from tidewheel.train.loop import train
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel import ParallelModel, init_weights
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch

SOPHIA = ("optimizer={kind: 'tidewheel_optimizers.sophia:SophiaG', every: 3, learning_rate: 0.001}",)


@pytest.fixture(autouse=True)
def _contrib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(CONTRIB))


def test_labels_follow_the_model():
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0]).expand(20_000, -1)
    labels = draw(logits, random_numbers(1, 2, 3, (20_000,)))
    shares = torch.bincount(labels, minlength=4) / len(labels)
    torch.testing.assert_close(shares, logits[0].softmax(-1), rtol=0, atol=0.01)


def test_labels_depend_on_their_place_alone():
    numbers = random_numbers(1, 2, 3, (4, 8))
    assert torch.equal(numbers, random_numbers(1, 2, 3, (4, 8)))
    assert len({float(random_numbers(*key, (1,))) for key in ((1, 2, 3), (0, 2, 3), (1, 1, 3), (1, 2, 2))}) == 4


def test_the_estimate_is_unbiased():
    """Of a linear model of one token: the sum over labels, by their probabilities, is the Gauss-Newton diagonal."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(3, generator=generator, dtype=torch.float64)
    chances = (weight @ x).softmax(-1)
    diagonal = (chances * (1 - chances))[:, None] * x.square()
    draws = 40_000
    labels = draw((weight @ x).expand(draws, -1), random_numbers(0, 0, 0, (draws,)))
    gradients = (chances - F.one_hot(labels, 5).double())[:, :, None] * x
    torch.testing.assert_close(gradients.square().mean(dim=0), diagonal, rtol=0.03, atol=1e-3)


def model_of(folder: Path) -> tuple[ParallelModel, SimpleNamespace, list[MicroBatch]]:
    settings = config(folder, "run", *SOPHIA)
    runtime = Runtime()
    model = parallel.build(settings, VOCABULARY, runtime)
    init_weights(model, seed=1)
    training = SimpleNamespace(config=settings, model=model, optimizer=build_optimizer(model, settings.optimizer),
                               device=torch.device("cpu"), collectives=Collectives(runtime))
    tokens = torch.randint(2, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(3))
    segments = torch.zeros_like(tokens)
    segments[:, 9:] = 1
    targets, positions = next_tokens(tokens, segments), torch.arange(16).expand(4, -1)
    micros = [MicroBatch(tokens[part], positions[part], segments[part], targets[part], number, 32,
                         int((targets[part] >= 0).sum())) for number, part in enumerate((slice(0, 2), slice(2, 4)))]
    return model, training, micros


@pytest.mark.parametrize("chunk", [0, 10])
def test_the_curvature_is_the_square_of_the_gradient_of_drawn_labels(tmp_path: Path, monkeypatch, chunk: int):
    """Whether all logits are in memory or those of ten tokens at a time."""
    if chunk:
        monkeypatch.setattr(curvature, "chunk_rows", lambda *_: chunk)
    model, training, micros = model_of(tmp_path)
    held = Curvature(training)
    for step in (1, 2, 3):  # of which the first is due
        held.before(step, micros)
    [decoder] = model.parts
    decoder.zero_grad()
    for number, micro in enumerate(micros):
        logits = decoder(micro.tokens, micro.positions, micro.segment_ids)
        numbers = random_numbers(training.config.seed, 1, number, micro.tokens.shape)
        labels = draw(logits.flatten(0, 1), numbers.flatten())
        labels = torch.where(micro.targets.flatten() >= 0, labels, -100)
        F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").backward()
    targets = sum(micro.num_targets for micro in micros)
    state = training.optimizer.tensors()
    for name, parameter in decoder.named_parameters():
        expected = 0.01 * parameter.grad.square() / targets
        torch.testing.assert_close(state[f"{name}.curvature"], expected, rtol=1e-4, atol=1e-9)
        assert float(expected.abs().max()) > 0


def sophia(folder: Path, ranks: int, *overrides: str) -> None:
    if str(CONTRIB) not in sys.path:
        sys.path.append(str(CONTRIB))
    rank = dist.get_rank() if ranks > 1 else 0
    train(config(folder, f"on-{ranks}", "reproducible=true", *SOPHIA, *overrides), Runtime(
        rank, ranks, checkpoints=FileCheckpoints(folder / f"{ranks}.npz"), control=Script(), sampler=text_sample))


def test_sophia_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, seed=1)
    on_ranks(2, sophia, tmp_path, 2, "parallel.data=zero3")
    sophia(tmp_path, 1)
    with np.load(tmp_path / "1.npz") as one, np.load(tmp_path / "2.npz") as two:
        names = [name for name in one.files if name != "extra"]
        assert any(name.endswith("curvature") and np.abs(one[name]).max() > 0 for name in names)
        for name in names:
            assert np.array_equal(one[name], two[name]), name


@pytest.mark.parametrize(("override", "told"), [
    ("parallel.tensor=2", "parallel.tensor is 2; nearest legal choice: tensor 1"),
    ("parameters=bf16 precision=bf16", "parameters bf16; nearest legal choice: fp32"),
    ("precision=fp16", "nearest legal choice: precision bf16")])
def test_what_has_no_estimate_is_refused(tmp_path: Path, override: str, told: str):
    with pytest.raises(ConfigError, match=told):
        config(tmp_path, "run", *SOPHIA, *override.split())
