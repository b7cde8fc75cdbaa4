"""Tests of teachers in files: tokens made once and resumed when killed, live teachers, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.train.columns import contents, kill_at_write
from tests.unit.train.helpers import config, write_shards
from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.models import describe
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, ShardError, TidewheelError
from tidewheel.inference.columns import FrozenModel, Made
from tidewheel.inference.teacher import make
from tidewheel.inference.writer import Writer
from tidewheel.shards.manifest import read_manifest, write_manifest
from tidewheel.shards.pairs import open_set
from tidewheel.train.config import TrainConfig

DISTIL = "objective.kind=distillation"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a packed set, a validation set, and a teacher of 2 steps."""
    folder = tmp_path_factory.mktemp("distillation")
    write_shards(folder / "shards", loss_mask=True)
    write_shards(folder / "validation", rows=4, seed=1, loss_mask=True)
    fit_local(config(folder, "teacher", "steps=2", "evaluation.sample_tokens=0"))
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> Made:
    return make(FrozenModel(str(folder / "runs/teacher")), [str(folder / "shards")], str(folder / "tokens"), top_k=4,
                temperature=2.0)


def student(folder: Path, run: str, *overrides: str) -> TrainConfig:
    return config(folder, run, DISTIL, "model.num_layers=1", "steps=4", "evaluation.sample_tokens=0", *overrides)


def test_tokens_are_those_of_the_model(folder: Path, made: Made):
    uri = str(folder / "shards")
    rows = open_set(uri, teacher=made.uri).rows(np.array([1, 0]), np.array([9, 0]))
    assert rows.teacher is not None
    writer = Writer.open(str(folder / "runs/teacher"))
    inputs = [torch.from_numpy(values.astype(np.int64)) for values in (rows.tokens, rows.positions, rows.segment_ids)]
    expected = (writer.model(*inputs).detach() / 2.0).log_softmax(dim=-1)
    real = rows.segment_ids >= 0
    top = expected.topk(4)
    assert np.array_equal(rows.teacher.tokens[real], top.indices.numpy()[real])
    found = rows.teacher.log_probabilities[real]
    assert np.allclose(found[:, :4], top.values.numpy()[real], atol=1e-5)
    assert np.allclose(np.exp(found).sum(axis=1), 1.0, atol=1e-5)


def test_a_killed_command_computes_only_what_is_missing(folder: Path, made: Made, monkeypatch: pytest.MonkeyPatch):
    model, sets, again = FrozenModel(str(folder / "runs/teacher")), [str(folder / "shards")], str(folder / "again")
    assert Path(made.uri).name == f"{digest(str(folder / 'runs/teacher')).groups['model'][:16]}-k4-t2.0"
    assert make(model, sets, str(folder / "tokens"), top_k=4, temperature=2) == Made(made.uri, 60, 0)
    kill_at_write(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        make(model, sets, again, top_k=4, temperature=2)
    monkeypatch.undo()
    result = make(model, sets, again, top_k=4, temperature=2)
    assert (result.rows, result.computed) == (60, 40), "the first of three shards, with 20 rows, was there"
    assert contents(Path(result.uri)) == contents(Path(made.uri))


def test_a_damaged_file_is_refused_and_made_again(folder: Path, made: Made):
    copy = folder / "damaged" / Path(made.uri).name
    shutil.copytree(made.uri, copy)
    victim = sorted(copy.rglob("*.arrow"))[0]
    data = victim.read_bytes()
    victim.write_bytes(data[:-200] + bytes(200))
    opened = open_set(str(folder / "shards"), teacher=str(copy), verify=True)


    def read_all() -> None:
        opened.rows(np.arange(3), np.zeros(3, dtype=np.int64))
        opened.settle()

    with pytest.raises(ShardError, match=r"tidewheel teacher .* --data SET"):
        read_all()
    next(copy.rglob("column.json")).unlink()
    with pytest.raises(ShardError, match="no tokens of a teacher of the set"):
        open_set(str(folder / "shards"), teacher=str(copy))
    make(FrozenModel(str(folder / "runs/teacher")), [str(folder / "shards")], str(folder / "damaged"), top_k=4,
         temperature=2.0)
    assert victim.read_bytes() == data


def metrics(folder: Path, run: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / f"runs/{run}/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_a_live_teacher_gives_what_its_tokens_give(folder: Path, made: Made):
    temperature = "objective.temperature=2.0"
    fit_local(student(folder, "stored", temperature, f"data.teacher={made.uri}"))
    live = [temperature, "objective.top_k=4", f"objective.teacher={folder}/runs/teacher"]
    fit_local(student(folder, "live", *live))
    for ours, theirs in zip(metrics(folder, "live"), metrics(folder, "stored"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["objective"] == pytest.approx(theirs["objective"], rel=1e-4)
    assert fit_local(student(folder, "live", *live, "steps=5")).steps == 5, "a later start has the same teacher"
    assert run_command(["evaluate", str(folder / "runs/live")]) == 0
    assert run_command(["audit", str(folder / "runs/live")]) == 0
    with pytest.raises(ConfigError, match="the run began with"):
        fit_local(student(folder, "live", temperature, f"objective.teacher={folder}/runs/stored", "steps=6"))
    other = make(FrozenModel(str(folder / "runs/stored")), [str(folder / "shards")], str(folder / "tokens"), top_k=4,
                 temperature=2.0)
    with pytest.raises(ConfigError, match="other settings of: teacher"):
        fit_local(student(folder, "stored", temperature, f"data.teacher={other.uri}", "steps=6"))


def test_a_teacher_in_bf16_keeps_its_weights_in_bf16(folder: Path):
    fit_local(student(folder, "low", f"objective.teacher={folder}/runs/teacher", "objective.teacher_weights=bf16",
                      "steps=1"))
    fit_local(student(folder, "high", f"objective.teacher={folder}/runs/teacher", "steps=1"))
    low, high = (metrics(folder, run)[0]["objective"] for run in ("low", "high"))
    assert low["cross_entropy"] == high["cross_entropy"]
    assert 0 < abs(low["divergence"] - high["divergence"]) < 0.02 * high["divergence"]


def refused(folder: Path, *overrides: str) -> TidewheelError:
    with pytest.raises(TidewheelError) as caught:
        fit_local(student(folder, "refused", *overrides))
    assert not (folder / "runs/refused").exists(), "before a step is taken"
    return caught.value


def test_what_does_not_belong_together_is_refused(folder: Path, made: Made):
    live, stored = f"objective.teacher={folder}/runs/teacher", f"data.teacher={made.uri}"
    assert "no teacher is given" in str(refused(folder))
    assert "both given" in str(refused(folder, live, stored))
    assert "uses no teacher" in str(refused(folder, stored, "objective.kind=next_token"))
    cold = refused(folder, stored)
    assert "made at temperature 2, but objective.temperature is 1" in str(cold)
    assert "objective.temperature=2" in cold.fix
    for given in (live, stored):
        error = refused(folder, given, "objective.temperature=2", "model.vocabulary_size=256")
        assert "has a vocabulary of 128, the student of 256" in str(error)
        assert "model.vocabulary_size=128" in error.fix
    assert "--data" in refused(folder, stored, f"data.uri={folder}/validation").fix
    missing = refused(folder, "objective.teacher=nowhere")
    assert "nowhere" in str(missing)
    other = folder / "retokenized"
    write_shards(other, loss_mask=True)
    text = (other / "tokenizer.json").read_text()
    stamp = storage.store(other).write("tokenizer.json", (text + " ").encode())
    manifest = read_manifest(storage.store(other))
    manifest.tokenizer["hash"] = stamp.hash
    write_manifest(storage.store(other), manifest)
    error = refused(folder, live, f"data.uri={other}", "data.validation=''")
    assert "trained with the tokenizer" in str(error)
    assert "tokenize the data" in error.fix
    with pytest.raises(ConfigError, match="made with the tokenizer"):
        make(FrozenModel(str(folder / "runs/teacher")), [str(other)], str(folder / "unwanted"), top_k=4)
    with pytest.raises(ConfigError, match="a number from 1 to 127"):
        make(FrozenModel(str(folder / "runs/teacher")), [str(folder / "shards")], str(folder / "unwanted"), top_k=128)


def test_an_adapter_alone_is_no_live_teacher(folder: Path):
    fit_local(config(folder, "adapter", "adapter.kind=lora", "adapter.rank=2", f"model.init_from={folder}/runs/teacher",
                     "steps=1", "evaluation.sample_tokens=0"))
    with pytest.raises(TidewheelError, match="an adapter without its base"):
        describe(str(folder / "runs/adapter"))
    tokens = make(FrozenModel(str(folder / "runs/adapter")), [str(folder / "shards")], str(folder / "adapted"), top_k=3)
    assert tokens.computed == 60
