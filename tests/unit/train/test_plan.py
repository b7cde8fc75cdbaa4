"""Tests of the dry run: it describes the run and starts nothing."""

from __future__ import annotations

import pytest

from tests.unit.train.helpers import config, write_shards
from tidewheel.errors import ConfigError, ShardError
from tidewheel.train.plan import plan


def test_the_plan_describes_the_run_and_writes_nothing(tmp_path):
    manifest = write_shards(tmp_path / "shards")
    rows = {row["what"]: row["value"] for row in plan(config(tmp_path))}
    assert f"{manifest.rows:,} sequences" in rows["shards"]
    assert rows["workers"].startswith("any of [1, 2]")
    assert rows["layout"] == "auto data parallelism"
    assert "1.07 epochs" in rows["tokens"]  # 8 steps of 8 sequences over 60
    assert not (tmp_path / "runs").exists()


def test_the_plan_describes_the_layout(tmp_path):
    write_shards(tmp_path / "shards")
    spread = config(tmp_path, "run", "parallel.data=zero3", "parallel.pipeline=2", "elastic.max_workers=4",
                    "batch.micro_sequences=1")
    rows = {row["what"]: row["value"] for row in plan(spread)}
    assert rows["layout"] == "zero3 data parallelism over copies on a mesh of pipeline 2"
    assert rows["workers"].startswith("any of [2, 4]")


def test_a_run_that_exists_would_be_resumed(tmp_path):
    write_shards(tmp_path / "shards")
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/run.json").write_text("{}")
    assert "would be resumed" in {row["what"]: row["value"] for row in plan(config(tmp_path))}["run"]


def test_missing_data_is_named(tmp_path):
    with pytest.raises(ShardError, match="shard set"):
        plan(config(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.uri"):
        plan(config(tmp_path, "run", "data.uri="))


def test_targets_of_an_adapter_are_checked(tmp_path):
    write_shards(tmp_path / "shards")
    assert plan(config(tmp_path, "run", "adapter={kind: lora, targets: [wq, w2]}"))
    with pytest.raises(ConfigError, match=r"'wqq' matches no module .*nearest names: wq"):
        plan(config(tmp_path, "run", "adapter={kind: lora, targets: [wqq]}"))
    with pytest.raises(ConfigError, match=r"'blocks\.7' matches no module"):
        plan(config(tmp_path, "run", "adapter={kind: lora, targets: [blocks.7]}"))
