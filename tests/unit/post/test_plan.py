"""Tests of the command line of a run of reinforcement learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.post.runs import inline, rollout_run
from tidewheel import cli
from tidewheel.elastic import trainer


def test_the_command_plans_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(trainer, "_local_pool", inline)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(rollout_run(tmp_path, "run", "steps=2").canonical()))
    assert cli.run_command(["train", str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 8 groups" in shown
    assert "judged by regex" in shown
    assert not (tmp_path / "runs").exists(), "nothing is written"
    assert cli.run_command(["train", str(path), "--local"]) == 0
    for command in (["audit"], ["rollouts", "show"], ["rollouts", "show", "--step", "1", "--json"]):
        assert cli.run_command([*command, f"{tmp_path}/runs/run"]) == 0
    shown = capsys.readouterr().out
    assert "every prompt was admitted or dropped by name once" in shown
    assert '"advantage"' in shown
    assert cli.run_command(["rollouts", "show", f"{tmp_path}/runs/run", "--step", "9"]) == 2
