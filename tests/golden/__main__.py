"""Record the outputs that versions promise: `python -m tests.golden`.

A case that is new, or whose versions have been raised, is recorded. One whose output has changed under the same
versions is refused: raise the version of the part that you changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.golden import cases, training
from tests.golden.compare import problem, training_problem


def main() -> int:
    """Update outputs.json and training.json; return 1 if a case is refused."""
    refused = _record(cases.RECORDED, cases.outcomes(), asdict, problem)
    refused += _record(training.RECORDED, training.cases(), training.Case.as_json, training_problem)
    return int(refused > 0)


def _record(path: Path, outcomes: Iterable[tuple[str, Any]], as_json: Callable[[Any], dict[str, Any]],
            check: Callable[[str, Any, Mapping[str, Any]], str]) -> int:
    """Update one file; return how many cases are refused.

    Args:
        path: of the file.
        outcomes: (name, case) of all cases.
        as_json: what the file holds of a case.
        check: returns what is wrong with a case, "" if nothing is.
    """
    before = json.loads(path.read_text()) if path.exists() else {}
    now = {}
    refused = 0
    for name, outcome in outcomes:
        entry = as_json(outcome)
        same_versions = name in before and before[name]["versions"] == outcome.versions
        why = check(name, outcome, before) if same_versions else ""
        if why:
            print(why, file=sys.stderr)
            refused += 1
        elif not same_versions or _settings(before[name]) != _settings(entry):
            print(f"recorded: {name}")
        now[name] = before[name] if why or (same_versions and _settings(before[name]) == _settings(entry)) else entry
    path.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    return refused


def _settings(entry: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(entry["settings"]))


if __name__ == "__main__":
    sys.exit(main())
