"""Tests of a run with a growing batch: killed, resumed on another number of processes, audited, traced."""

import json
from pathlib import Path

import pytest

from tests.unit.train.helpers import LENGTH, FileCheckpoints, Replaced, Script, config, two_processes, write_shards
from tidewheel import jsonlog, storage
from tidewheel.errors import ConfigError
from tidewheel.train import trace
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.plan import plan
from tidewheel.train.runtime import Runtime

SIZES = [8, 8, 8, 16, 16, 24, 24]
RAMP = (f"batch.ramp=[{{sequences: 8, tokens: {17 * LENGTH}}}, {{sequences: 16, tokens: {32 * LENGTH}}}]",
        "batch.global_sequences=24", "steps=7", "evaluation.every_steps=0", "evaluation.sample_tokens=0",
        "schedule.unit=tokens", "schedule.warmup_steps=0", f"schedule.warmup_tokens={24 * LENGTH}",
        "checkpoint.every_steps=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ramp")
    write_shards(base / "shards")
    write_shards(base / "validation", shards=1, rows=5, seed=1)
    ran(config(base, "whole", *RAMP))
    return base


def ran(settings: TrainConfig, generation: int = 0, **script: int) -> None:
    Path(settings.run.uri).mkdir(exist_ok=True)
    checkpoints = FileCheckpoints(Path(settings.run.uri) / f"{settings.run.id}.npz")
    train(settings, Runtime(generation=generation, checkpoints=checkpoints, control=Script(**script)))


def log(folder: Path, run: str, name: str) -> list[dict]:
    return jsonlog.read(storage.store(folder / "runs" / run), name)


def test_each_batch_follows_the_one_before(folder: Path):
    records = log(folder, "whole", "batches.jsonl")
    assert [record["count"] for record in records] == SIZES
    assert [record["position"] for record in records] == [sum(SIZES[:step]) for step in range(7)]
    audited = audit(str(folder / "runs" / "whole"))
    assert audited.ok, audited.summary()
    assert audited.sequences == sum(SIZES)
    rates = [line["learning_rate"] for line in log(folder, "whole", "metrics.jsonl") if "loss" in line]
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3]), "24 sequences of warm-up are three steps of 8"


def test_a_run_resumes_inside_the_ramp_on_two_processes(folder: Path):
    settings = config(folder, "killed", *RAMP)
    with pytest.raises(Replaced):
        ran(settings, die=3)  # the checkpoint is of step 2
    two_processes(settings, folder / "runs" / "killed.npz", generation=1)
    assert audit(settings.run_uri).ok
    for name, key in (("batches.jsonl", "digest"), ("metrics.jsonl", "loss")):
        whole, killed = ({line["step"]: line[key] for line in log(folder, run, name) if key in line}
                         for run in ("whole", "killed"))
        assert killed == (pytest.approx(whole, abs=1e-5) if key == "loss" else whole)


def test_lineage_knows_the_sizes(folder: Path):
    traced = trace.trace_step(str(folder / "runs" / "whole"), 6)
    assert traced["as_recorded"]
    assert len(traced["sequences"]) == 24
    document = traced["sequences"][20]["segments"][0]["document"]
    uses = trace.trace_document_steps(str(folder / "runs" / "whole"), document)["steps"]
    assert {(use["step"], use["batch_row"]) for use in uses} >= {(6, 20)}


def test_the_plan_describes_the_ramp(folder: Path):
    rows = {row["what"]: row["value"] for row in plan(config(folder, "planned", *RAMP))}
    assert rows["steps"].startswith("7 of 8 -> 16 -> 24 sequences")
    assert rows["tokens"].startswith(f"{sum(SIZES) * LENGTH:,},")
    assert json.loads((folder / "runs/whole/run.json").read_text())["config"]["batch"]["ramp"][0]["sequences"] == 8


def test_another_ramp_does_not_continue_the_run(folder: Path):
    with pytest.raises(Replaced):
        ran(config(folder, "strict", *RAMP), leave=2)
    with pytest.raises(ConfigError, match="other settings of: ramp"):
        ran(config(folder, "strict", *RAMP, "batch.ramp=[]"), generation=1)
