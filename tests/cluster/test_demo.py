"""`tidewheel demo` as a user starts it, with few steps, on an S3-protocol server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(960)]


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in `folder` on an object store."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "AWS_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "tidewheel.cli", "demo", "--storage", "s3", "--output", str(folder), *options],
        env=environment, cwd=folder, text=True, capture_output=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def demo(folder: Path, *options: str) -> tuple[str, str]:
    """Run the demo in `folder` on an object store, and return its console output and the report's HTML."""
    ended = run_demo(folder, *options)
    report = folder / "report.html"
    assert ended.stdout.splitlines()[-1] == str(report)  # it outlives the server
    return ended.stderr, report.read_text().lower().replace("_", " ")


def test_demo_on_an_object_store_ends_with_a_report(tmp_path):
    console, page = demo(tmp_path, "--steps", "12", "--no-disturb")
    assert "12 of 12 steps" in console
    for word in ("validation loss", "near duplicate", "contaminated"):
        assert word in page


@pytest.mark.long  # `test_elastic.py` kills and adds a node; `test_disturbance.py` tests when the demo does it
def test_demo_on_an_object_store_with_a_killed_and_a_joined_node(tmp_path):
    console, page = demo(tmp_path, "--steps", "140")
    assert "killed node" in console
    assert re.search(r"world sizes: .*2 -> 1 -> 2", console)
    assert "140 of 140 steps" in console
    for word in ("validation loss", "node lost", "node joined", "near duplicate", "contaminated"):
        assert word in page


@pytest.mark.long  # three trainings and three pipelines
def test_demo_goes_on_to_fine_tuning_and_preferences(tmp_path):
    ended = run_demo(tmp_path, "--steps", "12", "--no-disturb", "--posttrain")
    page = (tmp_path / "posttraining.html").read_text()
    assert ended.stdout.splitlines()[-1] == str(tmp_path / "posttraining.html")
    assert ended.stderr.count("12 of 12 steps") == 3
    for text in ("base model", "after SFT", "after DPO", "Please say what bisect is good for."):
        assert text in page
