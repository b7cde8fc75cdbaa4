"""The plan of a training run, for `tidewheel train --dry-run`. It starts no process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidewheel import storage
from tidewheel.errors import ConfigError
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.config import TrainConfig
from tidewheel.train.outer_config import OuterConfig
from tidewheel.train.parallel import legal

if TYPE_CHECKING:
    from tidewheel.shards.source import Source


def plan(config: TrainConfig) -> list[dict[str, Any]]:
    """Return rows of "what" and "value" about the run that a configuration describes.

    Raises:
        ConfigError: no shard set is given, or the mesh does not fit it.
        ShardError: the shard set is missing or damaged.
    """
    from tidewheel.shards.source import open_source
    from tidewheel.train import checks

    if not config.data.uri and config.data.mixture is None:
        raise ConfigError("data.uri is not set", where="training configuration",
                          fix="give the shard set: --set data.uri=OUTPUT/shards, where OUTPUT is a pipeline's output")
    source = open_source(config.data.uri, config.data.mixture, config.data.seed, partly=config.data.wait_seconds > 0)
    manifest = source.manifest
    rows = sum(domain.manifest.rows for domain in source.domains)
    vocabulary = config.model.vocabulary_size or manifest.vocabulary_size
    batch = config.batch
    length = manifest.sequence_length
    checks.fits(config, manifest)
    check_adapter(config, vocabulary)
    sequences = BatchSizes.of(batch, length).total(config.steps)
    row = length * config.objective.parts
    flops = config.model.flops_per_token(vocabulary, length) * sequences * row
    growing = " -> ".join(f"{size:,}" for size in batch.sizes)
    noun = "pairs" if config.objective.parts > 1 else "sequences"
    run = storage.store(config.run_uri)
    values: dict[str, Any] = {
        "run": config.run_uri + (" (exists: would be resumed)" if run.exists("run.json") else ""),
        **_sets(source, sequences),
        "validation": ", ".join(f"{name}: {uri}" if name else uri for name, uri
                                in config.data.validation_sets.items()) or "none",
        "model": f"{config.model.matmul_parameters(vocabulary) / 1e6:.2f} M parameters in matrix products, "
                 f"vocabulary {vocabulary:,}",
        "steps": f"{config.steps:,} of {growing} {noun} ({batch.global_sequences * row:,} tokens) each",
        "tokens": f"{sequences * row:,}, " + ("of a set that is still being written" if manifest.to_come
                                                 else f"{sequences / rows:.2f} epochs"),
        "compute": f"{flops:.3g} FLOPs",
        "workers": f"any of {list(legal.sizes(config))}, {config.elastic.cpus_per_worker:g} CPUs and "
                   f"{config.elastic.gpus_per_worker:g} GPUs each; the batches are the same for all of them",
        "layout": f"{config.parallel.data} data parallelism"
                  + (f" over copies on {legal.describe(config.parallel)}" if config.parallel.unit > 1 else ""),
        **({} if config.outer is None else {"groups": _groups(config.outer)}),
        "checkpoints": _checkpoints(config),
        "recipe": config.recipe_hash(),
    }
    return [{"what": name, "value": value} for name, value in values.items()]


def check_adapter(config: TrainConfig, vocabulary_size: int) -> None:
    """Check the targets of a run's adapter. Only a run with an adapter imports torch for it.

    Args:
        config: of the run.
        vocabulary_size: of the model.

    Raises:
        ConfigError: a target matches no module.
    """
    if config.adapter is not None:
        from tidewheel.train.parallel import building

        building.check_adapter(config, vocabulary_size)


def _groups(outer: OuterConfig) -> str:
    return (f"group {outer.group} of {outer.groups}, which meet every {outer.every} steps in {outer.store} and send "
            f"outer gradients in {outer.quantise}; the figures above are of this group")


def _checkpoints(config: TrainConfig) -> str:
    checkpoint = config.checkpoint
    when = []
    if checkpoint.every_steps == "auto":
        when.append("at the interval that costs least time")
    elif checkpoint.every_steps:
        when.append(f"every {checkpoint.every_steps} steps")
    if checkpoint.every_seconds:
        when.append(f"every {checkpoint.every_seconds:g} s")
    kept = [f"newest {checkpoint.keep_last}"]
    if checkpoint.keep_best:
        kept.append(f"best {checkpoint.keep_best}")
    if checkpoint.keep_every:
        kept.append(f"every {checkpoint.keep_every} steps")
    steps = checkpoint.memory_tier.every_steps
    memory = f"in memory every {steps} steps" if steps else "not in memory"
    if steps == "auto":
        memory = f"in memory as often as {checkpoint.memory_tier.share:.0%} of the time allows"
    return f"{' or '.join(when) or 'at the end'}, kept: {', '.join(kept)}; {memory}"


def _sets(source: Source, sequences: int) -> dict[str, str]:
    """Describe the shard set, or each domain of the mixture and the mixture's end."""
    length = source.manifest.sequence_length
    contents = {domain.name: f"{domain.uri}: {domain.manifest.rows:,} sequences of {length}, "
                             f"{domain.manifest.tokens:,} tokens" for domain in source.domains}
    if source.mixture is None:
        return {"shards": contents[""]}
    possible = sequences if source.end is None else min(source.end, sequences)
    lines = {f"domain {part['domain']}": f"{contents[part['domain']]}; {part['share']:.2%} of the run, "
                                         f"{part['epochs']:.2f} epochs" for part in source.proportions(possible)}
    end = "no end" if source.end is None else f"ends after {source.end:,} sequences, {source.end * length:,} tokens"
    return {**lines, "mixture": end + ("" if possible == sequences else ": TOO SHORT for this run")}
