"""What a driver imports before it owns the run: seconds in which nobody trains after a driver was killed."""

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


def test_a_driver_imports_neither_torch_nor_transformers(tmp_path: Path):
    write_shards(tmp_path / "shards", rows=40)
    config = {"run": {"uri": str(tmp_path / "runs"), "id": "run"}, "data": {"uri": str(tmp_path / "shards"), "seed": 3},
              "steps": 10, "model": {"dim": 64, "num_layers": 2, "num_heads": 4},
              "batch": {"global_sequences": 16, "micro_sequences": 4, "virtual_ranks": 4}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "config.yaml")], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.splitlines()[-1:] == ["[True] []"], done.stderr[-2000:]
