"""A run's MFU in metrics.jsonl, from known FLOPs, tokens, seconds and peak."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.unit.train.helpers import LENGTH, VOCABULARY, config, write_shards
from tidewheel import jsonlog
from tidewheel.train.loop import train
from tidewheel.train.metrics import reporter
from tidewheel.train.metrics.meter import Meter
from tidewheel.train.run import Run
from tidewheel.train.runtime import Runtime

PEAK = 1e12


def test_the_mfu_of_a_run_follows_from_its_tokens_seconds_and_the_peak(tmp_path, monkeypatch):
    write_shards(tmp_path / "shards", rows=64)
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    run = Run.open(config(tmp_path, "run", "evaluation.every_steps=0", "evaluation.sample_tokens=0"))
    monkeypatch.setattr(reporter, "Meter", functools.partial(Meter, peak=PEAK))
    result = train(run, Runtime())

    # the model of `config`: two blocks of width 32 with 4 heads of 8, 2 of them for keys, and a SwiGLU of 64. The
    # output matrix takes part in a product, the embedding and the norms do not.
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    weights = 2 * block + VOCABULARY * 32
    flops_per_token = 6 * weights + 12 * 2 * 4 * 8 * LENGTH
    lines = [line for line in jsonlog.read(run.store, "metrics.jsonl") if "mfu" in line]
    assert len(lines) == 8
    tokens = [after["tokens"] - before for before, after in zip([0, *(line["tokens"] for line in lines)], lines)]
    assert sum(tokens) == result.tokens
    assert all(0.5 * 8 * LENGTH < count <= 8 * LENGTH for count in tokens)
    for count, line in zip(tokens, lines):
        assert line["tokens_per_second"] == pytest.approx(count / line["step_seconds"])
        assert line["mfu"] == pytest.approx(count * flops_per_token / line["step_seconds"] / PEAK, rel=1e-9)


def test_numbers_that_a_person_can_check():
    """Two GPUs with a peak of 100 FLOP/s do 1,000 tokens of 6 FLOPs in 50 seconds: 120 of 200 FLOP/s."""
    meter = Meter(2, 100, 2, torch.device("cpu"), flops_per_token=6.0, peak=100.0)
    assert meter.step(1, tokens=400, seconds=30.0, waited=0.0) is None
    line = meter.step(2, tokens=600, seconds=20.0, waited=1.0)
    assert line is not None
    assert line["mfu"] == pytest.approx(0.6)
    assert line["tokens_per_second"] == pytest.approx(20.0)
