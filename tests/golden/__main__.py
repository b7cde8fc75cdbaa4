"""Record the outputs that versions promise: `python -m tests.golden`.

A case that is new, or whose versions have been raised, is recorded. One whose output has changed under the same
versions is refused: raise the version of the part that you changed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from tests.golden import cases
from tests.unit.test_golden import RECORDED, problem


def main() -> int:
    """Update outputs.json; return 1 if a case is refused."""
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    now = {}
    refused = 0
    for name, outcome in cases.outcomes():
        now[name] = asdict(outcome)
        if name in before and before[name]["versions"] == outcome.versions and (why := problem(name, outcome, before)):
            print(why, file=sys.stderr)
            now[name] = before[name]
            refused += 1
        elif now[name] != before.get(name):
            print(f"recorded: {name}")
    RECORDED.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
