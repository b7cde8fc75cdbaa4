"""Comparing what a case gives now with what was recorded for its versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.golden.cases import Outcome
from tests.golden.training import Case, different, read_rows

RECORD = "record it with `python -m tests.golden`"


def problem(name: str, now: Outcome, recorded: Mapping[str, Any]) -> str:
    """Return what is wrong with a case of the data half, for people; "" if nothing is.

    Args:
        name: of the case.
        now: what it gives now.
        recorded: content of outputs.json.
    """
    if why := _version_problem(name, now.versions, recorded) or _settings_problem(name, now, recorded):
        return why
    before = recorded[name]
    if before["output"] != now.output:
        return f"the output of {name} has changed: {_raise_one(now)}"
    if before.get("key", "") != now.key:
        return f"keys of {name} have changed though its output has not: what is finished would be done again"
    return ""


def training_problem(name: str, now: Case, recorded: Mapping[str, Any]) -> str:
    """Return what is wrong with a case of the training half, for people; "" if nothing is.

    Args:
        name: of the case.
        now: what it gives now.
        recorded: content of training.json.
    """
    if why := _version_problem(name, now.versions, recorded) or _settings_problem(name, now, recorded):
        return why
    before = recorded[name]
    if row := different(now.rows, read_rows(before), now.tolerance):
        return f"the output of {name} has changed ({row}): {_raise_one(now)}"
    if before["recipe"] != now.recipe:
        return f"recipe hashes of {name} have changed though its output has not: workflows would train again"
    return ""


def _version_problem(name: str, versions: dict[str, int], recorded: Mapping[str, Any]) -> str:
    if name not in recorded:
        return f"{name} is not recorded: {RECORD}"
    if recorded[name]["versions"] != versions:
        return f"the versions of {name} were {recorded[name]['versions']} and are {versions}: {RECORD}"
    return ""


def _settings_problem(name: str, now: Outcome | Case, recorded: Mapping[str, Any]) -> str:
    changed = list(_changed(recorded[name]["settings"], now.settings))
    if not changed:
        return ""
    return f"defaults of {name} have changed ({', '.join(changed)}), so recipes mean another thing: {_raise_one(now)}"


def _raise_one(now: Outcome | Case) -> str:
    return (f"raise the version of the part you changed, one of {', '.join(now.versions)}, and {RECORD}; "
            "or undo the change")


def _changed(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of recorded settings that differ now; settings that are new do not count."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name, value in before.items():
            yield from _changed(value, now.get(name, "not there"), f"{path}.{name}" if path else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from _changed(*pair, f"{path}.{index}")
    elif before != json.loads(json.dumps(now)):
        yield path
