"""`tidewheel demo` as a user starts it, on an S3-protocol server, with its disturbances, in few steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(960)]


def test_demo_on_an_object_store_with_a_killed_and_a_joined_node(tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "AWS_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "tidewheel.cli", "demo", "--storage", "s3", "--steps", "140", "--output", str(tmp_path)],
        env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=900, check=False)
    told = ended.stderr
    assert ended.returncode == 0, told
    assert "Traceback" not in told
    assert "killed node" in told
    assert re.search(r"world sizes: .*2 -> 1 -> 2", told)
    assert "140 of 140 steps" in told
    report = ended.stdout.splitlines()[-1]
    assert report == str(tmp_path / "report.html")  # printed last, and there though the server is gone
    page = (tmp_path / "report.html").read_text()
    for word in ("Validation loss", "node lost", "node joined", "near_duplicate", "contaminated"):
        assert word.lower().replace("_", " ") in page.lower().replace("_", " ")
