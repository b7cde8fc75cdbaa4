"""Tests of a run with a user's optimizer, schedule and objective: it resumes, but not with another source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.own_parts import overrides, write_parts
from tests.unit.train.helpers import config, write_shards
from tidewheel import parts
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.inference.evaluate import Evaluator


def test_a_run_resumes_with_the_same_bits_and_only_with_the_same_source(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", rows=4, seed=1)
    module = write_parts(tmp_path)
    monkeypatch.chdir(tmp_path)

    def settings(run: str, steps: int, *more: str):
        return config(tmp_path, run, f"steps={steps}", "evaluation.sample_tokens=0", *overrides(module), *more)

    fit_local(settings("straight", 6))
    fit_local(settings("halted", 3))
    fit_local(settings("halted", 6))
    halted = settings("halted", 6).run_uri
    assert digest(halted).state == digest(settings("straight", 6).run_uri).state
    run = json.loads((tmp_path / "runs/halted/run.json").read_text())
    assert set(run["code"]) == {"model", "optimizer", "schedule", "objective"}
    score = Evaluator(halted).evaluate(halted)
    result = json.loads((tmp_path / "runs/halted/result.json").read_text())
    assert score.loss == pytest.approx(result["validation_loss"])

    with monkeypatch.context() as patch:
        patch.setattr(type(settings("x", 1).objective), "sums", lambda self, outputs, batch: batch.nothing)
        with pytest.raises(ConfigError, match=f"{module}:Smooth failed: AttributeError"):
            fit_local(settings("mistaken", 2))
    source = tmp_path / f"{module}.py"
    source.write_text(source.read_text() + "# another line\n")
    parts._source_hash.cache_clear()
    with pytest.raises(ConfigError, match=r"model\.code was .* its source has changed") as refused:
        fit_local(settings("halted", 8))
    assert "restore them (the source that the run began with)" in refused.value.fix
    fit_local(settings("mistaken", 2))  # the run had done no step, so the mistake may be corrected
    assert settings("halted", 6).recipe_hash() != run["recipe_hash"]
