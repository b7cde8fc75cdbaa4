"""Train again on the rollouts of a run, in the order of its ledger, without any generator.

A replay is a run of its own with the other's settings and `rollouts.replay`. Its data are the other's shard set. The
waves have the choice of each step, and each shard is read with its hash, so in reproducible mode the same parameters
come out, whatever generators and schedule made the rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.config import build
from tidewheel.errors import ConfigError, StorageError
from tidewheel.post import ledger
from tidewheel.shards import growing
from tidewheel.train.config import TrainConfig
from tidewheel.train.starts import Change


def check_replay(config: TrainConfig) -> None:
    """Check that the run to be replayed has rollouts for all steps.

    Args:
        config: with `rollouts.replay`, and absolute URIs.

    Raises:
        ConfigError: it has none or too few, or would be written over.
        ShardError: a wave or an entry of the ledger is missing or damaged.
    """
    assert config.rollouts is not None
    folder, replayed = storage.store(config.data.uri), config.rollouts.replay
    if storage.absolute(replayed) == storage.absolute(config.run_uri):
        raise ConfigError("a run cannot replay itself", where="rollouts.replay", fix="give the replay another run.id")
    if not folder.exists(growing.GROWING):
        raise ConfigError("this run has no rollouts", where=replayed, fix="give a run whose settings have `rollouts`")
    shards = growing.read_set(folder).shards
    rollouts = config.rollouts
    waves = rollouts.wave_of(config.steps)
    if len(shards) < waves:
        raise ConfigError(f"the run has rollouts of {len(shards) * rollouts.wave_steps} steps, and the replay has "
                          f"{config.steps}", where=replayed,
                          fix="let the run finish: start it again, it continues where it stopped")
    for wave, info in enumerate(shards[:waves], start=1):
        ledger.read(folder, rollouts.first_step(wave), info.name)


def replayed(run_uri: str, to: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the settings that replay a run.

    Args:
        run_uri: URI of the run.
        to: URI of the new run's folder.
        overrides: "dotted.key=value", on top of the run's settings.

    Raises:
        StorageError: there is no such run.
        ConfigError: it makes no rollouts, or was started again with other settings in the middle.
    """
    run = storage.store(run_uri)
    if not run.exists("run.json"):
        raise StorageError("no run.json", where=run_uri, fix="give the folder of a run, such as runs/<id>")
    record: dict[str, Any] = run.read_json("run.json")
    values: dict[str, Any] = record["config"]
    if not values.get("rollouts"):
        raise ConfigError("this run makes no rollouts", where=run_uri, fix="give a run whose settings have `rollouts`")
    changed = [key for start in record.get("starts", ()) for key in start["changed"]
               if Change(key, None, None).is_reported]
    if changed:
        raise ConfigError(f"the run was started again with another {changed[0]}: a replay has one value for all steps",
                          where=run_uri, fix="replay a run whose settings stayed the same")
    parent, _, name = storage.absolute(to).rstrip("/").rpartition("/")
    data = {key: value for key, value in values.get("data", {}).items() if key != "uri"}
    rollouts = {**values["rollouts"], "replay": values["rollouts"].get("replay") or storage.absolute(run_uri)}
    return build(TrainConfig, {**values, "run": {"id": name, "uri": parent}, "data": data, "rollouts": rollouts},
                 overrides)


def same_parameters(one: str, other: str) -> tuple[str, bool]:
    """Return the SHA-256 of the parameters of a run's newest checkpoint, and whether another run has the same.

    Args:
        one: URI of the run.
        other: URI of the other run.

    Raises:
        CheckpointError: one of them has no intact checkpoint.
    """
    first, second = digest(one), digest(other)
    return first.groups["model"], first.step == second.step and first.groups["model"] == second.groups["model"]
