"""Reward models that learn from labels of steps: the loss of transformers' token classification, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.train.helpers import write_shards
from tests.unit.train.preferences.pairs import Pair, pair_config, random_pairs, write_pairs
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, ShardError
from tidewheel.shards.pairs import open_set
from tidewheel.train import objectives
from tidewheel.train.batches import micro_batch
from tidewheel.train.length_groups import cut
from tidewheel.train.objective import Outputs

STEP, RIGHT = 20, 27
"""The token that ends a step, and the token that a right step begins with."""
PROCESS = ("objective.kind=reward_model", "objective.head=process", f"objective.step_token={STEP}")


def labelled(count: int, seed: int) -> tuple[list[Pair], list[list[int]]]:
    """Return answers of steps, and their labels: a step is right if it begins with `RIGHT`."""
    random = np.random.default_rng(seed)
    pairs, labels = [], []
    for prompt, _, _ in random_pairs(count, seed):
        answer: list[int] = []
        own: list[int] = []
        for _ in range(random.integers(1, 4)):
            is_right = bool(random.integers(2))
            answer += [RIGHT if is_right else 3, *random.integers(4, 19, 1).tolist(), STEP]
            own += [-1, -1, int(is_right)]
        pairs.append((prompt, answer, []))
        labels.append(own)
    return pairs, labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a set of answers with labelled steps, and one of pairs."""
    path = tmp_path_factory.mktemp("steps")
    for name, count, seed in (("pairs", 256, 0), ("held_out", 16, 1)):
        pairs, labels = labelled(count, seed)
        write_pairs(path / name, pairs, shards=1, steps=labels)
    write_pairs(path / "plain", random_pairs(16))
    write_shards(path / "shards")
    return path


def test_the_loss_is_that_of_token_classification(folder: Path):
    """With the two logits (0, z), the cross-entropy of transformers, which TRL's PRMTrainer minimised."""
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    rows = open_set(str(folder / "pairs")).rows(np.zeros(6, dtype=np.int64), np.arange(6))
    batch = micro_batch(cut(rows, slice(0, 6), 16), slice(0, 6), 0, torch.device("cpu"))
    objective = objectives.KIND.build("reward_model", {"head": "process", "step_token": STEP})
    values = torch.randn(6, 16, 1, generator=torch.Generator().manual_seed(2), requires_grad=True)
    sums = objective.sums(Outputs(values, lambda hidden: hidden), batch)
    assert batch.step_labels is not None
    labels = batch.step_labels.long()
    count = objective.count(batch)
    assert count == int((labels >= 0).sum())
    (ours,) = torch.autograd.grad(sums.loss / count, values)
    logits = torch.cat((torch.zeros_like(values), values), dim=2)
    config = type("Config", (), {"num_labels": 2})()
    theirs = loss_utils.ForTokenClassification(logits, torch.where(labels >= 0, labels, -100), config)
    assert float(sums.loss.detach() / count) == pytest.approx(float(theirs.detach()), rel=1e-6)
    torch.testing.assert_close(ours, torch.autograd.grad(theirs, values)[0], rtol=1e-6, atol=1e-8)
    chosen = logits.argmax(dim=2)[labels >= 0] == labels[labels >= 0]
    assert float(sums.metrics["accuracies"]) == int(chosen.sum())


def test_steps_are_learnt(folder: Path):
    wanted = pair_config(folder, "learnt", *PROCESS, "steps=30", "optimizer.learning_rate=0.02",
                         "evaluation.every_steps=30")
    result = fit_local(wanted)
    lines = [json.loads(line) for line in (folder / "runs/learnt/metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "objective" in line)
    assert first["loss"] == pytest.approx(np.log(2), abs=0.2)
    assert result.validation_loss is not None
    assert result.validation_loss < 0.2
    assert run_command(["evaluate", wanted.run_uri]) == 0


def test_labels_of_steps_need_a_process_head(folder: Path):
    for kind in ("objective.kind=reward_model", "objective.kind=kto", "objective.kind=simpo"):
        with pytest.raises(ShardError, match="reward model with a process head"):
            fit_local(pair_config(folder, "refused", kind))
    with pytest.raises(ConfigError, match=rf"steps of the set end in the tokens \[{STEP}\], not all in step_token 5"):
        fit_local(pair_config(folder, "refused", *PROCESS[:2], "objective.step_token=5"))
    with pytest.raises(ShardError, match="unpaired is True, but False"):
        fit_local(pair_config(folder, "refused", *PROCESS, f"data.uri={folder}/plain"))
