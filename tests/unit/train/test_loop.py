"""Tests of the training loop: one and two processes give the same result, after kills, planned stops and resumes."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.train.helpers import LENGTH, FileCheckpoints, Replaced, Script, config, two_processes, write_shards
from tidewheel import jsonlog, storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import ConfigError, ShardError
from tidewheel.inference.sample import text_sample
from tidewheel.jsonlog import JsonLog
from tidewheel.models.decoder import IGNORED
from tidewheel.shards.manifest import write_manifest
from tidewheel.shards.reader import ShardSet
from tidewheel.train import checks
from tidewheel.train.audit import audit
from tidewheel.train.batches import micro_batch
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shard sets and the undisturbed run "whole" of one process."""
    folder = tmp_path_factory.mktemp("loop")
    write_shards(folder / "shards")
    write_shards(folder / "validation", shards=1, rows=11, seed=1)
    alone(config(folder, "whole"))
    return folder


def alone(settings: TrainConfig, generation: int = 0, **script: int):
    """Train in one process, with a checkpoint file next to the run."""
    folder = Path(settings.run.uri)
    folder.mkdir(exist_ok=True)
    control = Script(**script)
    runtime = Runtime(generation=generation, checkpoints=FileCheckpoints(folder / f"{settings.run.id}.npz"),
                      control=control, sampler=text_sample)
    return train(settings, runtime), control


def log(folder: Path, run: str, name: str) -> list[dict]:
    return jsonlog.read(storage.store(folder / "runs" / run), name)


def losses(folder: Path, run: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in log(folder, run, "metrics.jsonl") if "loss" in line}


def digests(folder: Path, run: str) -> dict[int, str]:
    return {line["step"]: line["digest"] for line in log(folder, run, "batches.jsonl")}


def weights(folder: Path, run: str) -> dict[str, np.ndarray]:
    with np.load(folder / "runs" / f"{run}.npz") as saved:
        return {name: saved[name] for name in saved.files if name != "extra"}


def assert_same_run(folder: Path, run: str, tolerance: float = 1e-5) -> None:
    expected, actual = losses(folder, "whole"), losses(folder, run)
    assert actual == pytest.approx(expected, abs=tolerance)
    assert digests(folder, run) == digests(folder, "whole")
    for name, value in weights(folder, "whole").items():
        np.testing.assert_allclose(weights(folder, run)[name], value, atol=10 * tolerance, err_msg=name)


def test_a_run_writes_its_records(reference: Path):
    metrics = log(reference, "whole", "metrics.jsonl")
    steps = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert {"time", "generation", "tokens", "gradient_norm", "learning_rate", "tokens_per_second", "world_size",
            "step_seconds", "data_wait_seconds"} <= set(steps[0])
    assert [line["step"] for line in metrics if "validation_loss" in line] == [3, 6, 8]
    assert steps[-1]["loss"] < steps[0]["loss"]
    run = json.loads((reference / "runs/whole/run.json").read_text())
    assert run["config"]["batch"]["global_sequences"] == 8
    assert run["versions"]["torch"]
    assert run["data"]["shards"]["rows"] == 60
    result = json.loads((reference / "runs/whole/result.json").read_text())
    assert result["steps"] == 8
    assert result["sample"].startswith("abc") or result["sample"].startswith("a b c")
    assert result["validation_loss"] == [line["validation_loss"] for line in metrics if "validation_loss" in line][-1]


def test_the_ledger_has_no_gap(reference: Path):
    lines = log(reference, "whole", "ledger.jsonl")
    assert lines[0]["category"] == "restart"
    assert {"productive", "restart"} <= {line["category"] for line in lines}
    for before, after in itertools.pairwise(lines):
        assert after["start"] == before["end"] >= before["start"]


def test_a_finished_run_does_nothing(reference: Path):
    before = (reference / "runs/whole/metrics.jsonl").read_bytes()
    result, control = alone(config(reference, "whole"), generation=1)
    assert result.steps == 8
    assert not control.events
    assert (reference / "runs/whole/metrics.jsonl").read_bytes() == before


def test_a_killed_run_resumes_and_reports_repeated_steps(reference: Path):
    settings = config(reference, "killed")
    with pytest.raises(Replaced):
        alone(settings, die=5)  # the checkpoint is of step 3
    _, control = alone(settings, generation=1)
    kind, detail = control.events[0]
    assert (kind, detail["step"], detail["redo"]) == ("resume", 3, 2)
    assert_same_run(reference, "killed", tolerance=0)
    audited = audit(settings.run_uri)
    assert audited.ok, audited.summary()
    assert (audited.redone, audited.steps, audited.records, audited.generations) == (2, 8, 10, 2)
    assert "redone" in {line["category"] for line in log(reference, "killed", "ledger.jsonl")}


def test_a_worker_that_dies_before_its_lines_are_written_loses_none(reference: Path, monkeypatch: pytest.MonkeyPatch):
    """On an object store lines are collected; the checkpoint of the next worker's start contains them too."""
    checkpoints = FileCheckpoints(reference / "unwritten.npz")
    with S3Server() as server:
        server.create_bucket("runs")
        settings = config(reference, "unwritten", "run.uri=s3://runs")
        run_store = storage.store(settings.run_uri)
        with monkeypatch.context() as patch:
            for name in ("flush", "_try", "_keep_trying"):  # and by no thread that outlives this block
                patch.setattr(JsonLog, name, lambda log: None)
            with pytest.raises(Replaced):
                train(settings, Runtime(checkpoints=checkpoints, control=Script(die=3)))
            assert not run_store.list("batches.jsonl")
            with pytest.raises(Replaced):
                train(settings, Runtime(checkpoints=checkpoints, control=Script(die=5), generation=1))
            assert not run_store.list("batches.jsonl")
        train(settings, Runtime(checkpoints=checkpoints, generation=2))
        audited = audit(settings.run_uri)
        assert audited.ok, audited.summary()
        # steps 4 and 5 of generation 1 left no trace
        assert (audited.steps, audited.redone, audited.generations) == (8, 0, 2)
        metrics = jsonlog.read(run_store, "metrics.jsonl")
        assert [line["step"] for line in metrics if "loss" in line] == list(range(1, 9))
        assert [line["step"] for line in metrics if "validation_loss" in line] == [3, 6, 8]


def test_two_processes_leave_as_planned_and_one_continues(reference: Path):
    """Two processes do steps 1 to 5, then stop as planned, and one does the rest: no step repeats, and none differs."""
    settings = config(reference, "shrunk")
    checkpoint = reference / "runs" / "shrunk.npz"
    two_processes(settings, checkpoint, leave=5)
    assert sorted(losses(reference, "shrunk")) == [1, 2, 3, 4, 5]
    assert {line["rank"] for line in log(reference, "shrunk", "ledger.jsonl")} == {0, 1}
    alone(settings, generation=1)
    assert_same_run(reference, "shrunk")
    audited = audit(settings.run_uri)
    assert audited.ok, audited.summary()
    assert (audited.world_sizes, audited.redone) == ((2, 1), 0)


def test_a_run_grows_from_one_process_to_two(reference: Path):
    """Two processes compute the same validation loss and text as one."""
    settings = config(reference, "grown")
    with pytest.raises(Replaced):
        alone(settings, leave=2)
    two_processes(settings, reference / "runs" / "grown.npz", generation=1)
    assert_same_run(reference, "grown")
    whole, grown = (json.loads((reference / "runs" / run / "result.json").read_text()) for run in ("whole", "grown"))
    assert grown["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-5)
    assert (grown["tokens"], grown["sample"]) == (whole["tokens"], whole["sample"])


def tampered(folder: Path, run: str, change) -> list[str]:
    source, target = folder / "runs" / "whole", folder / "runs" / run
    target.mkdir()
    (target / "run.json").write_bytes((source / "run.json").read_bytes())
    records = change([json.loads(line) for line in (source / "batches.jsonl").read_text().splitlines()])
    (target / "batches.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(audit(str(target)).mismatches)


def test_the_audit_sees_a_missing_step(reference: Path):
    problems = tampered(reference, "missing", lambda records: records[:3] + records[4:])
    assert "step 4 has no record" in problems
    assert any("was read 0 times" in line for line in problems), "the first epoch of 60 rows ends in step 8"


def test_the_audit_sees_a_wrong_digest(reference: Path):
    def swap(records):
        records[1]["digest"], records[2]["digest"] = records[2]["digest"], records[1]["digest"]
        return records

    problems = tampered(reference, "swapped", swap)
    assert [line.split(" (")[0] for line in problems] == ["step 2", "step 3"]


def test_the_audit_checks_repeated_steps(reference: Path):
    again = {"generation": 1, "digest": "0" * 32}
    problems = tampered(reference, "again", lambda records: [*records, {**records[0], **again}])
    assert len(problems) == 1
    assert problems[0].startswith("step 1 ")


def test_the_audit_sees_a_shifted_position(reference: Path):
    problems = tampered(reference, "shifted", lambda records: [{**records[0], "position": 3}, *records[1:]])
    assert "planned 0 + 8" in problems[0]


@pytest.mark.parametrize(("override", "error", "says"), [
    ("data.uri=''", ConfigError, "no training data"),
    ("data.uri=/nonexistent/set", ShardError, "/nonexistent/set"),
    ("model.vocabulary_size=64", ConfigError, "smaller than the shard set's 128"),
    ("model.max_sequence_length=8", ConfigError, "max_sequence_length is 8"),
])
def test_errors_come_before_anything_is_written(reference: Path, override: str, error: type, says: str):
    settings = config(reference, "refused", override)
    with pytest.raises(error, match=says):
        alone(settings)
    assert not (reference / "runs" / "refused").exists()


def test_sets_that_do_not_belong_together_are_refused(reference: Path):
    write_shards(reference / "other", shards=1, rows=4, vocabulary_size=256)
    with pytest.raises(ShardError, match="vocabulary_size is 256, but 128"):
        alone(config(reference, "refused", f"data.validation={reference / 'other'}"))


def test_a_run_is_not_continued_with_another_order(reference: Path):
    with pytest.raises(Replaced):
        alone(config(reference, "strict"), leave=3)
    with pytest.raises(ConfigError, match="other settings of: data_seed"):
        alone(config(reference, "strict", "data.seed=8"), generation=1)
    tokenizer = {"file": "tokenizer.json", "hash": f"blake3-{0:064}", "eos": 0, "pad": 1}
    write_shards(reference / "foreign", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="other settings of: shards, tokenizer"):
        alone(config(reference, "strict", f"data.uri={reference / 'foreign'}", "data.validation=''"), generation=1)


def test_a_run_without_a_newer_model_setting_continues_only_with_its_default(reference: Path):
    settings = config(reference)
    source, _ = checks.read_data(settings)
    saved = json.loads(json.dumps(checks.identity(settings, source)))
    del saved["model"]["norm_epsilon"]
    checks.continues(saved, settings, source)
    with pytest.raises(ConfigError, match="other settings of: model"):
        checks.continues(saved, config(reference, "run", "model.norm_epsilon=0.1"), source)


def test_a_finished_run_of_another_model_is_refused(reference: Path):
    assert alone(config(reference, "whole"))[0].steps == 8
    with pytest.raises(ConfigError, match="is finished, and trained another model"):
        alone(config(reference, "whole", "model.dim=64"))


def test_a_number_of_workers_that_does_not_divide_is_refused(reference: Path):
    with pytest.raises(ConfigError, match="3 workers cannot share 4 virtual ranks"):
        train(config(reference, "refused"), Runtime(world_size=3))


def test_a_loss_mask_selects_the_targets(tmp_path: Path):
    """The loss is the mean over the marked tokens, and other tokens have no effect."""
    write_shards(tmp_path / "shards", loss_mask=True)
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1, loss_mask=True)
    settings = config(tmp_path, "masked")
    alone(settings)
    written = ShardSet.open(str(tmp_path / "shards"))
    micro = micro_batch(written.rows(np.zeros(20, int), np.arange(20)), slice(None), 0, torch.device("cpu"))
    for row in range(20):
        for position in range(LENGTH - 1):
            inside = micro.segment_ids[row, position] == micro.segment_ids[row, position + 1] >= 0
            following = int(micro.tokens[row, position + 1])
            assert int(micro.targets[row, position]) == (following if inside and 1 < following < 12 else IGNORED)
    assert micro.num_targets == int((micro.targets >= 0).sum())
    assert len(losses(tmp_path, "masked")) == 8
    write_shards(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "shards", dirs_exist_ok=True)
    alone(config(tmp_path, "plain"))
    assert losses(tmp_path, "plain") != pytest.approx(losses(tmp_path, "masked"), abs=1e-3)


def test_preference_sets_are_refused(tmp_path: Path):
    manifest = write_shards(tmp_path / "shards")
    write_manifest(storage.store(tmp_path / "shards"), replace(manifest, kind="preferences"))
    with pytest.raises(ShardError, match=r"rows are pairs, but objective\.kind next_token"):
        alone(config(tmp_path, "pairs", "data.validation=''"))
