"""The plan of a run of reinforcement learning, for `tidewheel train --dry-run`. It starts and writes nothing."""

from __future__ import annotations

from typing import Any

from tidewheel import storage
from tidewheel.parts import name_of
from tidewheel.placement import with_labels
from tidewheel.post.prompts import prompts_of
from tidewheel.post.running import tokenizer_of
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import legal
from tidewheel.train.plan import check_adapter
from tidewheel.train.run import with_absolute_uris


def plan(config: TrainConfig) -> list[dict[str, Any]]:
    """Return rows of "what" and "value" about the run that a configuration describes.

    Raises:
        ConfigError, InputError: the tokenizer or the prompts are missing or do not fit.
    """
    config = with_absolute_uris(config)
    rollouts = config.rollouts
    assert rollouts is not None
    encoder, _ = tokenizer_of(config)
    prompts = prompts_of(config, encoder)
    vocabulary = config.model.vocabulary_size or encoder.padded_size
    check_adapter(config, vocabulary)
    groups = config.batch.global_sequences // rollouts.group
    epochs = rollouts.wave_of(config.steps) * config.wave_groups / len(prompts.prompts)
    run = storage.store(config.run_uri)
    generators = rollouts.generators
    at_most = "at most " if rollouts.schedule == "recorded" else ""
    values = {
        "run": config.run_uri + (" (exists: would be resumed)" if run.exists("run.json") else ""),
        "prompts": f"{len(prompts.prompts):,} of {rollouts.prompts}, {epochs:.2f} epochs if no group is dropped",
        "answers": f"{rollouts.group} a prompt, of at most {rollouts.answer_tokens:,} tokens, judged by "
                   f"{' and '.join(name_of(type(part)) for part in rollouts.judging())}",
        "engine": f"{name_of(type(rollouts.engine))}: {_contract(rollouts.engine.REPEATS)}",
        "objective": f"{name_of(type(config.objective))}, advantage {rollouts.advantage}",
        "model": f"{config.model.matmul_parameters(vocabulary) / 1e6:.2f} M parameters in matrix products, "
                 f"vocabulary {vocabulary:,}",
        "steps": f"{config.steps:,} of {groups:,} groups, sampled by a policy {at_most}{1 + rollouts.look_ahead} "
                 "wave(s) old",
        "waves": f"{rollouts.wave_of(config.steps):,} of {config.wave_groups:,} groups, each trained on in "
                 f"{rollouts.epochs} pass(es) of {rollouts.minibatches} step(s)",
        "trainers": f"any of {list(legal.sizes(config))}, {config.elastic.cpus_per_worker:g} CPUs and "
                    f"{config.elastic.gpus_per_worker:g} GPUs each",
        "generators": f"{generators.processes}, {generators.cpus:g} CPUs and {generators.gpus:g} GPUs each"
                      f"{with_labels(generators.placement.selector)}",
        "recipe": config.recipe_hash(),
    }
    return [{"what": name, "value": value} for name, value in values.items()]


def _contract(repeats: bool) -> str:
    return ("lost rollouts are made again with the same bits" if repeats else
            "rollouts are stored by hash before a step may have them; a lost one is sampled anew")
