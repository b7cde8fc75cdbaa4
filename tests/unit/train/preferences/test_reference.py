"""Tests of a reference model's log-probabilities: made once, resumed when killed, refused when of something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.train.columns import contents, kill_at_write
from tests.unit.train.helpers import config, write_shards
from tests.unit.train.preferences.pairs import pair_config, random_pairs, write_pairs
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.models import describe
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, ShardError, TidewheelError
from tidewheel.inference.columns import Made
from tidewheel.inference.reference import ReferenceModel, make
from tidewheel.inference.writer import Writer
from tidewheel.shards.pairs import open_set
from tidewheel.shards.verify import verify
from tidewheel.train.audit import audit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with preference sets, a base model of 2 steps, and one of 1 step."""
    folder = tmp_path_factory.mktemp("preferences")
    write_pairs(folder / "pairs", random_pairs(20), shards=3)
    write_pairs(folder / "held_out", random_pairs(5, seed=1), shards=1)
    write_shards(folder / "shards")
    write_shards(folder / "validation", rows=4, seed=1)
    for name, steps in (("base", 2), ("other", 1)):
        fit_local(config(folder, name, f"steps={steps}", "evaluation.sample_tokens=0"))
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> Made:
    return make(ReferenceModel(str(folder / "runs/base")), [str(folder / "pairs"), str(folder / "held_out")],
                str(folder / "references"), mismatched=True)


def test_values_are_those_of_the_model(folder: Path, made: Made):
    writer = Writer.open(str(folder / "runs/base"))
    rows = open_set(str(folder / "pairs"), parts=3, reference=made.uri).rows(np.array([1, 0]), np.array([4, 0]))
    assert rows.reference is not None
    tokens = torch.from_numpy(rows.tokens.reshape(6, -1).astype(np.int64))
    for index, sequence in enumerate(tokens):
        kept = rows.segment_ids.reshape(6, -1)[index] >= 0
        ids = sequence[torch.from_numpy(kept)][None]
        logits = writer.model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids)).detach()
        chances = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        in_answer = rows.loss_mask.reshape(6, -1)[index][kept][1:] if rows.loss_mask is not None else []
        expected = float((chances * torch.tensor(in_answer)).sum())
        assert rows.reference.reshape(6)[index] == pytest.approx(expected, rel=1e-5)


def test_a_killed_run_computes_only_what_is_missing(folder: Path, made: Made, monkeypatch: pytest.MonkeyPatch):
    model, sets = ReferenceModel(str(folder / "runs/base")), [str(folder / "pairs"), str(folder / "held_out")]
    assert Path(made.uri).name == digest(str(folder / "runs/base")).groups["model"][:16]
    before = contents(Path(made.uri))
    assert make(model, sets, str(folder / "references"), mismatched=True) == Made(made.uri, 25, 0)
    again = folder / "again"
    kill_at_write(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        make(model, sets, str(again), mismatched=True)
    monkeypatch.undo()
    [first] = again.rglob("*.f32")
    changed = first.stat().st_mtime_ns
    result = make(model, sets, str(again), mismatched=True)
    assert (result.rows, result.computed) == (25, 25 - 7), "the first of three shards, with 7 pairs, was there"
    assert first.stat().st_mtime_ns == changed
    assert contents(Path(result.uri)) == before


def test_a_damaged_file_is_computed_again(folder: Path, made: Made):
    copy = folder / "damaged"
    shutil.copytree(folder / "references", copy)
    shard = open_set(str(folder / "pairs")).manifest.shards[0].name.removesuffix(".arrow")
    [victim] = copy.rglob(f"{shard}*.f32")
    data = victim.read_bytes()
    victim.write_bytes(bytes(len(data)))
    target = copy / Path(made.uri).name
    opened = open_set(str(folder / "pairs"), reference=str(target))
    with pytest.raises(ShardError, match="has changed"):
        opened.rows(np.arange(3), np.zeros(3, dtype=np.int64))
    for head in copy.rglob("column.json"):
        head.unlink()
    with pytest.raises(ShardError, match="no log-probabilities of the set"):
        open_set(str(folder / "pairs"), reference=str(target))
    make(ReferenceModel(str(folder / "runs/base")), [str(folder / "pairs"), str(folder / "held_out")], str(copy),
         mismatched=True)
    assert victim.read_bytes() == data


def test_training_starts_at_the_reference_and_is_audited(folder: Path, made: Made):
    settings = pair_config(folder, "dpo", "objective.kind=dpo", f"model.init_from={folder}/runs/base",
                           f"data.reference={made.uri}")
    result = fit_local(settings)
    lines = (folder / "runs/dpo/metrics.jsonl").read_text().splitlines()
    assert '"loss":0.69314' in lines[0], "log 2: the policy is the reference"
    assert '"accuracies"' in lines[2]
    assert result.validation_loss is not None
    assert result.validation_loss < 0.69
    assert audit(str(folder / "runs/dpo")).ok
    assert run_command(["evaluate", str(folder / "runs/dpo")]) == 0


def refused(folder: Path, *overrides: str) -> TidewheelError:
    with pytest.raises(TidewheelError) as caught:
        fit_local(pair_config(folder, "refused", *overrides))
    assert not (folder / "runs/refused").exists(), "before a step is taken"
    return caught.value


def test_what_does_not_belong_together_is_refused(folder: Path, made: Made):
    base, reference = f"model.init_from={folder}/runs/base", f"data.reference={made.uri}"
    error = refused(folder, "objective.kind=dpo", f"model.init_from={folder}/runs/other", reference)
    assert isinstance(error, ConfigError)
    assert Path(made.uri).name in str(error)
    assert f"tidewheel reference {folder}/runs/other" in error.fix
    assert "random weights" in str(refused(folder, "objective.kind=dpo", reference))
    assert "tidewheel reference MODEL" in refused(folder, "objective.kind=dpo", base).fix
    assert "uses no reference model" in str(refused(folder, "objective.kind=orpo", base, reference))
    assert "objective.kind cpo, dpo" in refused(folder, base).fix
    packed = refused(folder, "objective.kind=orpo", f"data.uri={folder}/shards", "data.validation=''")
    assert "rows are packed sequences" in str(packed)
    assert "next_token" in packed.fix
    mixed = refused(folder, "objective.kind=orpo", f"data.validation={folder}/validation")
    assert "a set of packed, but the training set is of preferences" in str(mixed)
    write_pairs(folder / "more", random_pairs(8, seed=5))
    other = refused(folder, "objective.kind=dpo", base, reference, f"data.uri={folder}/more", "data.validation=''")
    assert "no log-probabilities of the set" in str(other)
    assert f"--data {folder}/more" in other.fix
    fewer = make(ReferenceModel(str(folder / "runs/base")), [str(folder / "more")], str(folder / "fewer"))
    kto = refused(folder, "objective.kind=kto", base, f"data.reference={fewer.uri}", f"data.uri={folder}/more",
                  "data.validation=''")
    assert "--mismatched" in kto.fix


def test_another_model_may_be_the_reference_if_that_is_meant(folder: Path, made: Made):
    settings = pair_config(folder, "apart", "objective.kind=dpo", f"model.init_from={folder}/runs/other", "steps=1",
                           f"data.reference={made.uri}", "objective.start_is_reference=false", "data.validation=''")
    assert fit_local(settings).steps == 1


def test_equal_answers_are_refused(folder: Path):
    pairs = random_pairs(8, seed=2)
    write_pairs(folder / "equal", [*pairs[:3], (pairs[3][0], pairs[3][1], pairs[3][1]), *pairs[4:]], shards=1)
    error = refused(folder, "objective.kind=orpo", f"data.uri={folder}/equal", "data.validation=''")
    assert "both answers of row 3 are equal" in str(error)
    with pytest.raises(ShardError, match="both answers of row 3 are equal"):
        make(ReferenceModel(str(folder / "runs/base")), [str(folder / "equal")], str(folder / "unwanted"))
    assert "both answers of row 3 are equal" in str(verify(str(folder / "equal")))


def test_a_reward_model_is_no_decoder(folder: Path):
    settings = pair_config(folder, "reward", "objective.kind=reward_model", f"model.init_from={folder}/runs/base",
                           "steps=2")
    assert fit_local(settings).sample == ""
    run = str(folder / "runs/reward")
    assert run_command(["evaluate", run]) == 0
    for use in (lambda: Writer.open(run), lambda: ReferenceModel(run), lambda: describe(run),
                lambda: fit_local(config(folder, "late", f"model.init_from={run}", "steps=1"))):
        with pytest.raises(TidewheelError, match="a decoder is expected"):
            use()


def test_single_answers_train_kto_alone(folder: Path):
    single = [(prompt, chosen, []) if index % 3 else (prompt, [], rejected)
              for index, (prompt, chosen, rejected) in enumerate(random_pairs(20, seed=3))]
    uri = str(folder / "single")
    write_pairs(uri, single, unpaired=True)
    made = make(ReferenceModel(str(folder / "runs/base")), [uri], str(folder / "references"), mismatched=True)
    start = (f"data.uri={uri}", "data.validation=''", f"model.init_from={folder}/runs/base")
    wanted = pair_config(folder, "kto", *start, "objective.kind=kto", f"data.reference={made.uri}")
    assert fit_local(wanted).steps == 4
    assert audit(str(folder / "runs/kto")).ok
    first = (folder / "runs/kto/metrics.jsonl").read_text().splitlines()[0]
    assert '"loss":0.5' in first, "the policy is the reference"
    error = refused(folder, *start, "objective.kind=orpo")
    assert "one answer and a label" in str(error)
    assert "objective.kind kto" in error.fix
