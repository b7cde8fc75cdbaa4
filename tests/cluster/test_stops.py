"""SIGTERM to a pipeline with its own Ray prints one sentence; Ray's handler printed a C++ stack trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
RECIPE = {"name": "stops", "partitions": 1, "read": {"paths": ["*.jsonl"]},
          "steps": ["dedup_exact", {"tokenize": {"train": {"vocabulary_size": 300}}},
                    {"pack": {"sequence_length": 16}}]}


def test_a_pipeline_says_one_sentence_and_goes_on(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(30):
        lines = [json.dumps({"text": f"document {number} {place} " + "words and more " * 20}) for place in range(50)]
        (tmp_path / f"in/{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-m", "tidewheel.cli", "data", "run", str(tmp_path / "recipe.yaml"), "--input",
               str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["PYTHONPATH"] = str(ROOT / "platform")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if "ingest: " in line:
            process.send_signal(signal.SIGTERM)
            break
    output += process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert output.splitlines()[-1] == "stopped; give the same command again to continue"
    assert "SIGTERM received" not in output, output  # the first line of that trace
    assert not (tmp_path / "out/summary.json").exists()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr  # no lock remains
