"""Partitions in one direction, made by the kernel in a network namespace. They need root on Linux."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.elastic.real_partition import SETUP

pytestmark = pytest.mark.long


@functools.cache
def problem() -> str:
    """Return why there can be no network namespace here; "" if there can."""
    try:
        tried = subprocess.run(["unshare", "-n", "sh", "-c", SETUP], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


@pytest.mark.parametrize(("case", "error"), [("unheard", "no sign of life"), ("deaf", "")])
def test_only_the_worker_that_is_cut_off_is_left_out(case: str, error: str, tmp_path: Path) -> None:
    if problem():
        pytest.skip(f"no network namespace: {problem()}")
    command = f"{SETUP}\nexec {sys.executable} -m tests.unit.elastic.real_partition {case} {tmp_path}"
    done = subprocess.run(["unshare", "-n", "sh", "-c", command], capture_output=True, text=True, timeout=800,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert error in json.loads(done.stdout)["error"]
    print(done.stdout)
