"""What a driver imports before it owns the run: seconds in which nobody trains after a driver was killed.

Commands that train nothing do without the same modules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.train.helpers import write_shards

PROGRAM = """
import sys
from tidewheel.config import load
from tidewheel.elastic import trainer
from tidewheel.train.config import TrainConfig
owned = []
trainer.run_workers = lambda *arguments, **named: owned.append(True)
trainer.fit(load(TrainConfig, sys.argv[1]))
from tidewheel.elastic.ray_adapter import ElasticTrainer
from tidewheel.train.run import Run
with trainer._making_rollouts(Run.open(load(TrainConfig, sys.argv[1]))):
    print(owned, [name for name in ("torch", "transformers") if name in sys.modules])
"""

COMMANDS = """
import sys
from tidewheel.cli import run_command
codes = [run_command(["train", sys.argv[1], "--set", "data.uri=nowhere"]), run_command(["audit", sys.argv[2]])]
print(codes, [name for name in ("torch", "transformers") if name in sys.modules])
"""


def run(program: str, *arguments: str) -> str:
    """Run a program in a process of its own and return the last line that it prints."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.stdout, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_a_driver_and_an_audit_import_neither_torch_nor_transformers(tmp_path: Path):
    write_shards(tmp_path / "shards", rows=40)
    config = {"run": {"uri": str(tmp_path / "runs"), "id": "run"}, "data": {"uri": str(tmp_path / "shards"), "seed": 3},
              "steps": 10, "model": {"dim": 64, "num_layers": 2, "num_heads": 4},
              "batch": {"global_sequences": 16, "micro_sequences": 4, "virtual_ranks": 4}}
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    assert run(PROGRAM, str(file)) == "[True] []"
    # before the run is owned, a wrong setting is refused as quickly; the audit only reads what the run has recorded
    assert run(COMMANDS, str(file), str(tmp_path / "runs/run")) == "[2, 2] []"
