"""Tests of validation by domain: against a loop over tokens, and in a run with metrics, TensorBoard and samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.train.helpers import LENGTH, VOCABULARY, Script, config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.errors import ConfigError, ShardError
from tidewheel.inference.sample import text_sample
from tidewheel.models.decoder import Decoder
from tidewheel.shards.reader import ShardSet
from tidewheel.train import evaluation, parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.data_config import DataConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a training set and two validation sets."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_shards(folder / "shards")
    write_shards(folder / "web", shards=2, rows=7, seed=1)
    write_shards(folder / "code", shards=1, rows=5, seed=2)
    return folder


def settings(folder: Path, *overrides: str) -> TrainConfig:
    validation = f"data.validation={{web: {folder / 'web'}, code: {folder / 'code'}}}"
    return config(folder, "run", validation, *overrides)


@torch.no_grad()
def reference_score(model: Decoder, folder: Path, max_rows: int) -> tuple[float, int, int]:
    """Return the nats, predicted tokens and bytes, computed token by token with each document alone."""
    shard_set = ShardSet.open(str(folder))
    counts = [shard.rows for shard in shard_set.manifest.shards]
    rows_to_score = [(shard, row) for shard, count in enumerate(counts) for row in range(count)][:max_rows]
    nats, tokens, size = 0.0, 0, 0
    for shard, row in rows_to_score:
        rows = shard_set.rows(np.array([shard]), np.array([row]))
        for segment in range(int(rows.segment_ids.max()) + 1):
            document = torch.from_numpy(rows.tokens[0][rows.segment_ids[0] == segment].astype(np.int64))[None]
            logits = model(document, torch.arange(document.shape[1])[None], torch.zeros_like(document))
            chosen = logits[0].double().log_softmax(-1)[:-1].gather(1, document[0, 1:, None])
            nats -= float(chosen.sum())
            tokens += document.shape[1] - 1
            size += int((document[0, 1:] > 1).sum())  # a letter of the tokenizer is a byte, a special token none
    return nats, tokens, size


@pytest.mark.parametrize("most", [0, 6])
def test_scores_are_those_of_each_document_alone(sets: Path, most: int):
    run_config = settings(sets, f"evaluation.sequences={most}")
    runtime = Runtime()
    model = parallel.build(run_config, VOCABULARY, runtime)
    parallel.init_weights(model, 1)
    opened = evaluation.open_sets(run_config, torch.device("cpu"))
    scores = evaluation.validate(model, opened, run_config, Collectives(runtime))
    assert list(scores) == ["code", "web"]
    total = [0.0, 0]
    for name, score in scores.items():
        nats, tokens, size = reference_score(model.parts[0], sets / name, most or 1000)
        assert score.tokens == tokens
        assert score.loss == pytest.approx(nats / tokens, rel=1e-6)
        assert score.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-6)
        assert score.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)
        total = [total[0] + nats, total[1] + tokens]
    assert evaluation.overall(scores) == pytest.approx(total[0] / total[1], rel=1e-6)


def test_a_run_records_its_domains_samples_and_speed(sets: Path):
    run_config = settings(sets, "evaluation.sample_every_steps=4", "profile={steps: [2, 3]}", "metrics.every_steps=2",
                      "steps=7")
    control = Script()
    result = train(run_config, Runtime(control=control, sampler=text_sample))
    run_store = storage.store(run_config.run_uri)
    lines = jsonlog.read(run_store, "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4, 6, 7]
    assert {"tokens", "gradient_norm", "learning_rate", "tokens_per_second", "tokens_per_second_per_worker",
            "step_seconds", "data_wait_seconds", "world_size", "generation", "host_resident_bytes"} <= set(steps[0])
    evaluated = [line for line in lines if "validation" in line]
    assert [line["step"] for line in evaluated] == [3, 6, 7]
    assert set(evaluated[0]["validation"]) == {"web", "code"}
    assert evaluated[-1]["validation_loss"] == result.validation_loss
    samples = [(line["step"], line["sample"]) for line in lines if "sample" in line]
    assert [step for step, _ in samples] == [4, 7]
    assert samples[-1][1] == result.sample
    profiles = [detail for kind, detail in control.events if kind == "profile"]
    assert [detail["files"] for detail in profiles] == [[run_store.at("profile/steps_2-3.json.gz")]]
    tensorboard = EventAccumulator(str(Path(run_config.run_uri) / "tensorboard"))
    tensorboard.Reload()
    assert [event.step for event in tensorboard.Scalars("train/loss")] == [2, 4, 6, 7]
    assert [event.step for event in tensorboard.Scalars("validation/web/bits_per_byte")] == [3, 6, 7]
    run = json.loads((Path(run_config.run_uri) / "run.json").read_text())
    assert {name: summary["rows"] for name, summary in run["data"]["validation"].items()} == {"web": 14, "code": 5}
    assert run["data"]["validation"]["web"]["sequence_length"] == LENGTH


def test_wrong_sets_are_refused(sets: Path, tmp_path: Path):
    write_shards(tmp_path / "other", shards=1, rows=2, vocabulary_size=256)
    with pytest.raises(ShardError, match="vocabulary_size is 256"):
        train(config(sets, "refused", f"data.validation={{web: {sets / 'web'}, odd: {tmp_path / 'other'}}}"), Runtime())
    with pytest.raises(ConfigError, match="not a valid name"):
        build(DataConfig, {"validation": {"a/b": "x"}})
    with pytest.raises(ConfigError, match="has no URI"):
        build(DataConfig, {"validation": {"web": ""}})
