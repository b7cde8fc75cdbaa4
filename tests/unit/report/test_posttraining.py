"""Tests of the page about fine-tuning and preferences, and of the losses by source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidewheel import storage
from tidewheel.report import posttraining, sources
from tidewheel.storage import Store
from tidewheel.train.metrics.scalars import scalars


def run(folder: Path, metrics: list[dict[str, Any]], answers: dict[int, list[str]]) -> Store:
    """Write the logs of a run that answered two prompts at some steps."""
    folder.mkdir()
    prompts = [{"id": name, "messages": [{"role": "user", "content": f"ask <{name}>"}]} for name in ("a", "b")]
    lines = [{"step": step, **prompt, "answer": answer, "time": step}
             for step, given in answers.items() for prompt, answer in zip(prompts, given)]
    for name, records in (("metrics", metrics), ("answers", lines)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return storage.store(folder)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Store, Store]:
    steps = [{"step": step, "time": step, "loss": 4.0 / step, "tokens": 10 * step, "world_size": 1}
             for step in range(1, 5)]
    pairs = {"loss": 0.5, "perplexity": None, "tokens": 20, "accuracies": 0.95, "margins": 1.25}
    sft = run(tmp_path / "sft", steps, {0: ["the the", "of"], 2: ["x", "y"], 4: ["<b>long</b> and more", "long too"]})
    dpo = run(tmp_path / "dpo", [*steps, {"step": 4, "time": 5, "validation": {"": pairs}}],
              {0: ["<b>long</b> and more", "long too"], 4: ["short", "brief"]})
    return sft, dpo


def test_the_answers_of_three_models_stand_side_by_side(runs: tuple[Store, Store]):
    compared = posttraining.compared(*runs)
    assert [list(given.values()) for _, given in compared.values()] == [
        ["the the", "<b>long</b> and more", "short"], ["of", "long too", "brief"]]
    page = posttraining.page_of(*runs).render().decode()
    assert "&lt;b&gt;long&lt;/b&gt; and more" in page
    assert "ask &lt;a&gt;" in page
    assert "<b>long" not in page
    for text in ("4.00 → 1.00", "95 %", "margin 1.25", "Words after SFT", "2.5", "1.0"):
        assert text in page


def test_losses_by_source_have_curves_and_tags():
    lines = [{"step": step, "sources": {"code": {"loss": 3 - step / 10, "tokens": 7},
                                        **({"web": {"loss": 4 - step / 10, "tokens": 9}} if step % 2 else {})}}
             for step in range(1, 9)]
    figure, table = sources.section([*lines, {"step": 8, "loss": 1.0}])
    assert figure.count("<path") + figure.count("<polyline") >= 2
    for text in ("code", "web", "56", "36"):
        assert text in table
    assert sources.section([{"step": 1, "loss": 2.0}]) == []
    record = {"step": 1, "time": 0.0, "sources": {
        "web": {"loss": 2.5, "tokens": 9}, "bad": {"loss": None, "tokens": 1}}}
    assert scalars(record) == {"sources/web/loss": 2.5}
