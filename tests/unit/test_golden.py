"""Each part gives the output that was recorded for its version, for a fixed input."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import pytest

import tidewheel.data
import tidewheel.rewards
from tests.golden import cases
from tests.golden.cases import Outcome
from tests.golden.compare import problem
from tidewheel.data.filter import FILTERS
from tidewheel.data.reader import READERS
from tidewheel.rewards import KIND as REWARDS
from tidewheel.versions import Version

UNHELD = {"filter_language", "filter_classifier", "read_warc", "own_filters", "own_readers", "own_rewards"}
"""Parts whose output follows from other packages, whose versions are in the keys too, or from user code."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(cases.RECORDED.read_text())


def test_every_stage_gives_what_its_version_promises(recorded: dict[str, Any]):
    outcomes = cases.pipeline_cases()
    assert set(outcomes) == {f"stage {name}" for name in cases.STAGES}
    assert [message for name, outcome in outcomes.items() if (message := problem(name, outcome, recorded))] == []


@pytest.mark.parametrize("name", list(cases.CASES))
def test_every_filter_reader_and_reward_gives_what_its_version_promises(name: str, recorded: dict[str, Any]):
    assert problem(name, cases.CASES[name](), recorded) == ""


def test_no_part_is_without_a_promise(recorded: dict[str, Any]):
    held = {part for case in recorded.values() for part in case["versions"]}
    parts = {kind.find(name).VERSION.part for kind in (FILTERS, READERS, REWARDS) for name in kind.built_in()}
    for package in (tidewheel.data, tidewheel.rewards):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, Version):
                    parts.add(value.part)
    assert parts - held == UNHELD


def test_each_change_has_its_message():
    before = {"case": {"versions": {"a": 1}, "settings": {"x": 1, "deep": [{"y": 2}]}, "output": "o"}}
    settings = {"x": 1, "deep": [{"y": 2, "new": 0}], "more": 5}
    assert problem("case", Outcome({"a": 1}, settings, "o"), before) == ""
    assert "raise the version" in problem("case", Outcome({"a": 1}, settings, "p"), before)
    assert "deep.0.y" in problem("case", Outcome({"a": 1}, {"x": 1, "deep": [{"y": 3}]}, "o"), before)
    assert "keys of case have changed" in problem("case", Outcome({"a": 1}, settings, "o", "k"), before)
    assert "are {'a': 2}" in problem("case", Outcome({"a": 2}, settings, "p"), before)
    assert "not recorded" in problem("other", Outcome({"a": 1}, settings, "o"), before)
