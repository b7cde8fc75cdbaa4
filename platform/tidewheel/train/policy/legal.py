"""Check that the settings of a training fit reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.parts import name_of
from tidewheel.shards.manifest import ROLLOUTS
from tidewheel.train import objectives
from tidewheel.train.policy.config import RolloutsConfig
from tidewheel.train.policy.objective import PolicyObjective

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig


def problem(config: TrainConfig, rollouts: RolloutsConfig) -> str:
    """Return why the settings do not fit reinforcement learning, with the nearest legal choice; "" if they do.

    Args:
        config: of the run.
        rollouts: its rollouts.
    """
    return _of_training(config, rollouts) or _of_sampling(config, rollouts)


def _of_training(config: TrainConfig, rollouts: RolloutsConfig) -> str:
    if config.objective.READS != ROLLOUTS:
        fitting = objectives.where(lambda objective: objective.READS == ROLLOUTS)
        return (f"rollouts are given, but objective.kind {name_of(type(config.objective))} learns from other data; "
                f"nearest legal choice: one of {fitting}")
    own = rollouts.folder(config.run_uri)  # as `Run.open` sets it
    if config.data.uri not in ("", own) or config.data.mixture is not None or config.data.validation:
        return "rollouts are given, and data.uri, data.mixture or data.validation too: leave those out"
    if config.steps % rollouts.wave_steps:
        fewer = config.steps // rollouts.wave_steps * rollouts.wave_steps
        return (f"steps {config.steps} end amid the rollouts.epochs {rollouts.epochs} x rollouts.minibatches "
                f"{rollouts.minibatches} steps of a wave; nearest legal choice: {fewer or rollouts.wave_steps}")
    if config.batch.global_sequences % rollouts.group:
        whole = max(rollouts.group, config.batch.global_sequences // rollouts.group * rollouts.group)
        return (f"batch.global_sequences {config.batch.global_sequences} is not a multiple of rollouts.group "
                f"{rollouts.group}; nearest legal choice: {whole}")
    if config.batch.ramp:
        return "batch.ramp changes the sequences of a step, which rollouts do not; nearest legal choice: no ramp"
    if config.guards.may_roll_back:
        return ("a guard's rollback passes over data, which rollouts follow from; nearest legal choice: skip in "
                "guards.non_finite and guards.spike")
    if config.adapter is not None:
        return "rollouts of a model with an adapter are not supported; leave adapter out"
    if config.reproducible and rollouts.environment is not None and not rollouts.environment.DETERMINISTIC:
        return (f"reproducible, but the replies of rollouts.environment.kind {name_of(type(rollouts.environment))} "
                "do not follow from its seed; nearest legal choice: reproducible false")
    if (rollouts.advantage == "gae") != config.objective.VALUES:
        fitting = objectives.where(lambda objective: objective.VALUES)
        return (f"objective.kind {name_of(type(config.objective))} with rollouts.advantage {rollouts.advantage}: "
                f"only gae uses a value head; nearest legal choice: objective.kind {fitting} with advantage gae")
    return ""


def _of_sampling(config: TrainConfig, rollouts: RolloutsConfig) -> str:
    longest = rollouts.sequence_length or config.model.max_sequence_length
    if rollouts.answer_tokens >= longest:
        return (f"rollouts.answer_tokens {rollouts.answer_tokens} leaves no room for a prompt in {longest} tokens; "
                f"nearest legal choice: {longest // 2}")
    if config.objective.needs_teacher and not getattr(config.objective, "teacher", ""):
        return (f"objective.kind {name_of(type(config.objective))} learns from answers that are new at each step, so "
                "its teacher runs beside it: set objective.teacher to a run or checkpoint")
    if isinstance(config.objective, PolicyObjective) and config.objective.correction != "none" \
            and rollouts.wave_steps > 1:
        return (f"objective.correction {config.objective.correction} takes the clipped ratio to the policy of each "
                "step, so with rollouts.epochs or minibatches nothing would be clipped; nearest legal choice: "
                "objective.correction none")
    if isinstance(config.objective, PolicyObjective) and config.objective.temperature != rollouts.temperature:
        return (f"objective.temperature {config.objective.temperature:g} is not that of the rollouts, "
                f"{rollouts.temperature:g}; set both to one value")
    if problem := rollouts.engine.problem(config.model, config.decoding(), rollouts.generators.gpus):
        return f"rollouts.engine.kind {name_of(type(rollouts.engine))}: {problem}"
    return ""
