"""Plain elastic Ray Train under the events of a Tidewheel run: `python -m tests.chaos.training --peer`.

The model, batch, added step time and steps between saves are the same. The code follows Ray's documentation: a
`TorchTrainer` with `ScalingConfig(num_workers=(1, n))`, DDP, `ray.train.report` with a checkpoint of rank 0,
`FailureConfig(max_failures=-1)`, and defaults otherwise. Events that do not apply are left out: its checkpoints have no
hashes, so none is damaged, and its store is a folder that never becomes unavailable.

`python -m tests.chaos.peer TRAIN.yaml ADDRESS` is the driver.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LEFT_OUT = frozenset({"corrupt_newest", "storage_away"})
REPLACEMENTS = {"kill_during_save": "kill_worker", "kill_node_of_rank_0": "kill_node"}
"""Replacements for events that use Tidewheel's files to choose their moment or victim."""


def train_loop(settings: dict[str, Any]) -> None:
    """Train as one worker."""
    import ray.train
    import ray.train.torch
    import torch

    from tidewheel.models.decoder import Decoder
    from tidewheel.models.initial_values import init_parameter
    from tidewheel.train.config import TrainConfig

    config = TrainConfig.model_validate(settings["config"])
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    model = Decoder(config.model, settings["vocabulary_size"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config.model, config.seed))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    rows = -(-config.batch.global_sequences // size)
    positions = torch.arange(settings["length"])[None]
    while step < config.steps:
        for begin in range(0, rows, config.batch.micro_sequences):
            count = min(config.batch.micro_sequences, rows - begin)
            tokens = torch.randint(2, 28, (count, settings["length"]))
            logits = model(tokens, positions.expand(count, -1), torch.zeros_like(tokens))
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            (loss * count / rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(float(os.environ.get("CHAOS_STEP_SECONDS", "0")))
        step += 1
        if rank == 0:
            with open(settings["log"], "a") as log:
                log.write(json.dumps({"time": time.time(), "step": step, "world_size": size}) + "\n")
        if step % config.checkpoint.every_steps == 0:
            with tempfile.TemporaryDirectory() as folder:
                reported = None
                if rank == 0:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                               Path(folder) / "state.pt")
                    reported = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=reported)


def main() -> int:
    """Train until the end, or until this process is killed."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from tests.chaos.world import LENGTH
    from tests.unit.train.helpers import VOCABULARY
    from tidewheel.config import load
    from tidewheel.train.config import TrainConfig

    config = load(TrainConfig, sys.argv[1])
    ray.init(address=sys.argv[2], log_to_driver=False, logging_level="ERROR")
    folder = Path(config.run_uri)
    folder.mkdir(parents=True, exist_ok=True)
    TorchTrainer(
        train_loop, train_loop_config={"config": config.canonical(), "vocabulary_size": VOCABULARY, "length": LENGTH,
                                       "log": str(folder / "metrics.jsonl")},
        scaling_config=ScalingConfig(num_workers=(config.elastic.min_workers, config.elastic.max_workers)),
        run_config=RunConfig(name="peer", storage_path=str(folder),
                             failure_config=FailureConfig(max_failures=-1))).fit()
    (folder / "result.json").write_text("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
