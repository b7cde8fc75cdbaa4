"""A part's version is a promise: a fixed input, and the output that was recorded for the version."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import tidewheel.data
from tests.golden import cases
from tests.golden.cases import Outcome
from tidewheel.data.filter import FILTERS
from tidewheel.data.reader import READERS
from tidewheel.versions import Version

RECORDED = Path(cases.__file__).with_name("outputs.json")
UNHELD = {"filter_language", "filter_classifier", "read_warc", "own_filters", "own_readers"}
"""Parts whose output follows from packages, whose versions are in the keys beside these, or from the code of users."""


def problem(name: str, now: Outcome, recorded: dict[str, Any]) -> str:
    """Return what is wrong with a case, for people; "" if nothing is."""
    before = recorded.get(name)
    record = "record it with `python -m tests.golden`"
    if before is None:
        return f"{name} is not recorded: {record}"
    if before["versions"] != now.versions:
        return f"the versions of {name} were {before['versions']} and are {now.versions}: {record}"
    raise_one = (f"raise the version of the part you changed, one of {', '.join(now.versions)}, and {record}; "
                 "or undo the change")
    if changed := list(_changed(before["settings"], now.settings)):
        return f"defaults of {name} have changed ({', '.join(changed)}), so recipes mean another thing: {raise_one}"
    if before["output"] != now.output:
        return f"the output of {name} has changed: {raise_one}"
    if before.get("key", "") != now.key:
        return f"keys of {name} have changed though its output has not: what is finished would be done again"
    return ""


def _changed(before: Any, now: Any, path: str = "") -> Any:
    """Yield the dotted names of recorded settings that differ now; settings that are new do not count."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name, value in before.items():
            yield from _changed(value, now.get(name, "not there"), f"{path}.{name}" if path else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from _changed(*pair, f"{path}.{number}")
    elif before != json.loads(json.dumps(now)):
        yield path


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


def test_every_stage_gives_what_its_version_promises(recorded: dict[str, Any]):
    outcomes = cases.pipeline_cases()
    assert set(outcomes) == {f"stage {name}" for name in cases.STAGES}
    assert [why for name, outcome in outcomes.items() if (why := problem(name, outcome, recorded))] == []


@pytest.mark.parametrize("name", list(cases.CASES))
def test_every_filter_and_reader_gives_what_its_version_promises(name: str, recorded: dict[str, Any]):
    assert problem(name, cases.CASES[name](), recorded) == ""


def test_no_part_is_without_a_promise(recorded: dict[str, Any]):
    held = {part for case in recorded.values() for part in case["versions"]}
    parts = {kind.find(name).VERSION.part for kind in (FILTERS, READERS) for name in kind.built_in()}
    for module in pkgutil.walk_packages(tidewheel.data.__path__, "tidewheel.data."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Version):
                parts.add(value.part)
    assert parts - held == UNHELD


def test_what_a_change_is_told_as():
    before = {"case": {"versions": {"a": 1}, "settings": {"x": 1, "deep": [{"y": 2}]}, "output": "o"}}
    settings = {"x": 1, "deep": [{"y": 2, "new": 0}], "more": 5}
    assert problem("case", Outcome({"a": 1}, settings, "o"), before) == ""
    assert "raise the version" in problem("case", Outcome({"a": 1}, settings, "p"), before)
    assert "deep.0.y" in problem("case", Outcome({"a": 1}, {"x": 1, "deep": [{"y": 3}]}, "o"), before)
    assert "keys of case have changed" in problem("case", Outcome({"a": 1}, settings, "o", "k"), before)
    assert "are {'a': 2}" in problem("case", Outcome({"a": 2}, settings, "p"), before)
    assert "not recorded" in problem("other", Outcome({"a": 1}, settings, "o"), before)
