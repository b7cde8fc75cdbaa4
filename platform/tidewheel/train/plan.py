"""What a training configuration would do, for `tidewheel train --dry-run`: no process is started."""

from __future__ import annotations

from typing import Any

from tidewheel import storage
from tidewheel.errors import ConfigError
from tidewheel.train.config import TrainConfig


def plan(config: TrainConfig) -> list[dict[str, Any]]:
    """Rows of "what" and "value".

    Raises:
        ConfigError: no shard set is given.
        ShardError: the shard set is missing or damaged.
    """
    from tidewheel.shards.manifest import read_manifest

    if not config.data.uri:
        raise ConfigError("data.uri is not set", where="training configuration",
                          mend="give the shard set: --set data.uri=OUTPUT/shards, where OUTPUT is a pipeline's output")
    manifest = read_manifest(storage.store(config.data.uri))
    vocabulary = config.model.vocabulary_size or manifest.vocabulary_size
    batch, length = config.batch, manifest.sequence_length
    step_tokens = batch.global_sequences * length
    sequences = config.steps * batch.global_sequences
    flops = config.model.flops_per_token(vocabulary, length) * step_tokens * config.steps
    sizes = [size for size in range(config.elastic.min_workers, config.elastic.max_workers + 1)
             if batch.virtual_ranks % size == 0]
    run = storage.store(config.run_uri)
    values: dict[str, Any] = {
        "run": config.run_uri + (" (exists: would be resumed)" if run.exists("run.json") else ""),
        "shards": f"{config.data.uri}: {manifest.rows:,} sequences of {length}, {manifest.tokens:,} tokens",
        "validation": config.data.validation or "none",
        "model": f"{config.model.matmul_parameters(vocabulary) / 1e6:.2f} M parameters in matrix products, "
                 f"vocabulary {vocabulary:,}",
        "steps": f"{config.steps:,} of {batch.global_sequences} sequences ({step_tokens:,} tokens) each",
        "tokens": f"{config.steps * step_tokens:,}, {sequences / manifest.rows:.2f} epochs",
        "compute": f"{flops:.3g} FLOPs",
        "workers": f"any of {sizes}, {config.elastic.cpus_per_worker:g} CPUs and {config.elastic.gpus_per_worker:g} "
                   "GPUs each; the batches are the same for all of them",
        "checkpoints": f"every {config.checkpoint.every_steps} steps, newest {config.checkpoint.keep_last} kept",
        "recipe": config.recipe_hash(),
    }
    return [{"what": name, "value": value} for name, value in values.items()]
