"""mypy finds nothing in the package, the pipelines, the jobs and the tests.

It runs beside the other tests, since in a fresh clone it takes a minute of one core.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs_pages import ROOT


@pytest.mark.timeout(600)
def test_mypy_finds_nothing():
    process = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, check=False)
    assert process.returncode == 0, process.stdout[-10_000:]
