"""mypy finds nothing in the package, the pipelines, the jobs and the tests.

It runs beside the other tests, since in a fresh clone it takes a minute of one core. The second test finds the first
one's cache, which saves it that minute.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.docs_pages import ROOT
from tests.unit.test_typed_sdk import WRONG, write_recipe


def test_mypy_finds_nothing():
    process = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, check=False)
    assert process.returncode == 0, process.stdout[-10_000:]


def test_mypy_knows_the_sdk(tmp_path: Path):
    process = subprocess.run([sys.executable, "-m", "mypy", "--config-file", "pyproject.toml",
                              str(write_recipe(tmp_path))], cwd=ROOT, capture_output=True, text=True, check=False)
    assert {int(line) for line in re.findall(r"recipe\.py:(\d+): error", process.stdout)} == WRONG, process.stdout
