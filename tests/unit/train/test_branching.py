"""Tests of branches: a new run begins with the whole state of another one, which is never changed."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.train.helpers import config, write_shards
from tests.unit.train.test_continuing import events, lines, losses, steps
from tidewheel import storage
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.report.run import write_run_report
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.branching import Branch

BASE = ("schedule.kind=constant", "evaluation.every_steps=0", "evaluation.sample_tokens=0", "reproducible=true",
        "metrics.every_steps=1", 'data.validation=""', "checkpoint.every_steps=2", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shards and the run "base" of 8 steps."""
    folder = tmp_path_factory.mktemp("branching")
    write_shards(folder / "shards")
    fit_local(config(folder, "base", *BASE))
    return folder


def content(folder: Path, run: str) -> dict[str, bytes]:
    """Return all files of a run."""
    root = folder / "runs" / run
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_a_branch_goes_on_exactly_where_the_parent_stood_and_leaves_it_alone(folder: Path):
    before = content(folder, "base")
    fit_local(config(folder, "twin", *BASE, "run.branch=base@4"))
    assert losses(folder, "twin") == {step: loss for step, loss in losses(folder, "base").items() if step > 4}
    assert [line["digest"] for line in lines(folder, "twin", "batches.jsonl")] == [
        line["digest"] for line in lines(folder, "base", "batches.jsonl")][4:]
    assert steps(folder, "twin") == [4, 6, 8], "its own copy of the first state, so that it needs the parent no more"
    assert content(folder, "base") == before
    audited = audit(str(folder / "runs/twin"))
    assert audited.ok, audited.summary()
    assert audited.steps == 8


def test_a_branch_of_a_branch_has_both_in_its_lineage_and_report(folder: Path):
    fit_local(config(folder, "child", *BASE, f"run.branch={folder}/runs/base@2", "optimizer.learning_rate=0.001"))
    fit_local(config(folder, "grandchild", *BASE, "run.branch=child@6", "optimizer.learning_rate=0.001", "steps=10"))
    line = store(str(folder / "runs/grandchild")).read_json("run.json")["branch"]
    assert (line["id"], line["step"], line["parent"]["id"], line["parent"]["step"]) == ("child", 6, "base", 2)
    page = Path(write_run_report(str(folder / "runs/grandchild"))).read_text()
    assert "Lineage" in page
    assert f"{folder}/runs/base" in page
    assert audit(str(folder / "runs/grandchild")).ok
    assert losses(folder, "child")[3] == losses(folder, "base")[3], "the same state and data"
    assert losses(folder, "child")[5] != losses(folder, "base")[5], "another rate"


def test_a_killed_branch_continues_from_its_own_state(folder: Path):
    settings = config(folder, "killed", *BASE, "run.branch=base@4")

    def kill(progress: dict[str, Any]) -> None:
        if progress.get("step") == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_local(settings, on_progress=kill)
    fit_local(settings)
    assert losses(folder, "killed") == {step: loss for step, loss in losses(folder, "base").items() if step > 4}
    assert len(events(folder, "killed", "branched")) == 1
    assert audit(settings.run_uri).ok


@pytest.mark.parametrize(("overrides", "message"), [
    (("run.branch=nowhere@4",), "no run to branch from"),
    (("run.branch=base@5",), r"(?s)no complete checkpoint of step 5.*steps 2, 4, 6, 8"),
    (("run.branch=base@8", "steps=6"), "begins after step 8, but steps is 6"),
    (("run.branch=base@4", "optimizer.kind=lion"), "optimizer.kind was adamw, now lion"),
    (("run.branch=base@4", "data.seed=8"), "data.seed was 7, now 8"),
    (("run.branch=base@4", "model.dim=64"), "model.dim was 32, now 64")])
def test_what_cannot_be_a_branch_is_refused_before_anything_is_written(folder: Path, overrides: tuple[str, ...],
                                                                        message: str):
    settings = config(folder, "refused", *BASE, *overrides)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        fit_local(settings)
    assert not (folder / "runs/refused").exists()


def test_a_run_does_not_branch_from_itself_nor_change_its_parent_later(folder: Path):
    with pytest.raises(ConfigError, match="cannot branch from itself"):
        fit_local(config(folder, "self", *BASE, "run.branch=self@4"))
    fit_local(config(folder, "once", *BASE, "run.branch=base@6"))
    with pytest.raises(ConfigError, match=r"run\.branch was .*base@6, now : it began with another state"):
        fit_local(config(folder, "once", *BASE, "steps=10"))


@pytest.mark.parametrize("text", ["base", "@4", "base@", "base@-1", "base@4.5", "base@x"])
def test_a_name_without_run_or_step_is_refused(text: str):
    with pytest.raises(ValueError, match="is not RUN@STEP"):
        Branch.parse(text)
    assert Branch.parse("s3://user@bucket/runs/base@40") == Branch("s3://user@bucket/runs/base", 40)
    assert str(Branch.parse("base@7", "runs")) == f"{storage.join('runs', 'base')}@7"
