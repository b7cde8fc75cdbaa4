"""The tests marked gpu as a row: how many passed."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from tests.benchmarks.gpu.case import Case
from tests.gpu import command

COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)")
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
TAIL = 2000


def run(case: Case) -> dict[str, Any]:
    """Run the tests and return their counts.

    Raises:
        RuntimeError: pytest did not get as far as a summary.
    """
    lines = []
    with subprocess.Popen([sys.executable, *command()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)  # at once: the row's time limit must not hide which tests ran
            lines.append(line)
    return counts("".join(lines))


def counts(output: str) -> dict[str, Any]:
    """Return the counts of pytest's last line, and the names of tests that failed.

    Raises:
        RuntimeError: there is no such line.
    """
    lines = output.strip().splitlines() or [""]
    results = {kind.removesuffix("s") if kind == "errors" else kind: int(number)
             for number, kind in COUNT.findall(lines[-1])}
    if not results:
        raise RuntimeError(f"pytest wrote no summary: {output[-TAIL:]}")
    failed = results.get("failed", 0) + results.get("error", 0)
    return {"passed": results.get("passed", 0), "failed": failed, "skipped": results.get("skipped", 0),
            "valid": not failed, "failures": sorted(set(FAILURE.findall(output)))}
