"""Decide which settings may change when a run is started again, and record each start in run.json.

A restart may change how a run continues, but not what it is; `REFUSED` has the rule. run.json holds every start, so
that a report or an audit knows the settings of each step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.models.family import KERNELS
from tidewheel.provenance import git_commit, versions, without_secrets
from tidewheel.storage import Store
from tidewheel.train.config import TrainConfig
from tidewheel.train.history import last_step
from tidewheel.train.record import PACKAGES

RUN = "run.json"
CODE = ".code"
"""End of the dotted name under which the hash of a part's source is compared."""
VERSION = "version."
"""Start of the dotted name under which the version of a part is compared: "version.optimizer_adamw"."""
REFUSED: dict[str, str] = {
    "model": "the weights have another shape, or mean something else",
    "adapter": "the trained parameters would be others",
    "optimizer.kind": "the saved state belongs to another optimizer",
    "parameters": "the weights and the optimizer's state are in another format",
    "batch.global_sequences": "the order of the tokens would change",
    "batch.ramp": "the order of the tokens would change",
    "batch.virtual_ranks": "the random states belong to another number of virtual ranks",
    "run.branch": "it began with another state",
    "data.seed": "the order of the tokens would change",
    "data.mixture": "the order of the tokens would change",
    **dict.fromkeys(("outer.groups", "outer.group"), "the order of the tokens would change"),
    **dict.fromkeys((f"outer.{name}" for name in ("every", "learning_rate", "momentum", "quantise",
                                                  "error_feedback", "fragments", "overlap", "merge")),
                    "the groups' rounds would no longer be the same"),
    "rollouts.replay": "the data would be another run's",
    "rollouts.schedule": "the ledger would have two kinds of steps",
    "rollouts.look_ahead": "the ledger's steps would have two bounds of the lag",
    "rollouts.epochs": "the order of the rollouts would change",
    "rollouts.minibatches": "the order of the rollouts would change",
}
"""Settings that define a run, and why each must not change. All others may."""
FREE_PARTS_OF_MODEL = tuple(f"model.{name}" for name in (*KERNELS, "init_from"))
"""Settings of the model that may change: how products are computed, and where the first weights came from."""
REFUSED_IF_REPRODUCIBLE: dict[str, str] = {
    "precision": "every later step would give other bits",
    "batch.micro_sequences": "sums over micro-batches would have another order",
    "reproducible": "every later step would give other bits",
    "version": "every later step would give other bits",
}
"""Further settings that a run in reproducible mode must not change."""
SILENT = ("run", "checkpoint", "elastic", "parallel", "compile", "compile_cache", "run_ahead", "memory", "metrics",
          "profile", "logs", "callbacks", "data.uri", "data.reference", "data.teacher", "data.cache", "data.prefetch",
          "data.validation", "data.wait_seconds", "rollouts.generators",
          "outer.store", "outer.patience_seconds", "outer.keep")
"""Settings that do not change what a step computes. A change of them is recorded and not reported."""


@dataclass(frozen=True)
class Change:
    """A setting that differs from the previous start."""

    key: str
    """Dotted name, such as "optimizer.learning_rate"."""
    before: Any
    now: Any
    refused: str = ""
    """Why the run cannot continue with the change; "" if it can."""

    @property
    def of_code(self) -> bool:
        """Whether the source of a user's own part has changed."""
        return self.key.endswith(CODE)

    @property
    def of_version(self) -> bool:
        """Whether the version of a built-in part has changed."""
        return self.key.startswith(VERSION)

    @property
    def is_reported(self) -> bool:
        """Whether to report the change to the user."""
        return not _below(self.key, SILENT)


def record_start(store: Store, config: TrainConfig, epoch: int) -> list[Change]:
    """Compare the settings with those of the run's last start, add this start to run.json, and return the changes.

    A run without run.json has no earlier start and no changes: its first group of workers writes that file. The source
    of a user's own part may change until the first step is done, so that a first mistake does not cost a run.

    Args:
        store: the run's folder. The caller owns the run.
        config: the settings of this start.
        epoch: in which the caller owns the run.

    Raises:
        ConfigError: a setting that defines the run has changed; nothing was written.
    """
    if not store.exists(RUN):
        return []
    run = store.read_json(RUN)
    changes = changed(last_settings(run), settings_of(config), reproducible=bool(run["config"].get("reproducible")))
    refused = [change for change in changes if change.refused]
    if refused and not (all(change.of_code or change.of_version for change in refused) and last_step(store) == 0):
        reasons = "; ".join(f"{change.key} was {change.before}, now {change.now}: {change.refused}"
                            for change in refused)
        settings = [change for change in refused if not (change.of_code or change.of_version)]
        originals = [" ".join(f"--set {change.key}={change.before}" for change in settings)] if settings else []
        if any(change.of_code for change in refused):
            originals.append("the source that the run began with")
        if any(change.of_version for change in refused):
            originals.append("the release of tidewheel that the run began with; see run.json")
        raise ConfigError(f"this run cannot continue with other settings ({reasons})", where=config.run_uri,
                          fix=f"restore them ({'; '.join(originals)}), or start a new run with another run.id; "
                          f"it can begin with these weights: model.init_from={config.run_uri}")
    entry = {"epoch": epoch, "time": time.time(), "changed": {change.key: change.now for change in changes},
             **_changed_code(run), **_changed_parts(run, config)}
    store.write_json(RUN, {**run, "starts": [*run.get("starts", ()), entry]})
    return changes


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return all settings by their dotted names, without the user and password of any URI.

    They include the hash of the source of each of the user's own parts, such as "optimizer.code", and the version of
    each built-in part, such as "version.optimizer_adamw".
    """
    hashes = {name: code.hash for name, code in config.own_parts().items()}
    return {**_flat(without_secrets(config.canonical())), **_sources(hashes), **_versions(config.versions())}


def last_settings(run: Mapping[str, Any], epoch: int | None = None) -> dict[str, Any]:
    """Return the settings of a start.

    Args:
        run: content of run.json.
        epoch: of the start; None for the newest.
    """
    groups = {"objective" if name == "loss" else name: value for name, value in run["config"].items()}  # former name
    settings = {**_flat(groups), **_sources(run.get("code", {}))}
    parts = run.get("part_versions", {})
    for start in run.get("starts", ()):
        if epoch is None or start["epoch"] <= epoch:
            settings |= start["changed"]
            parts = start.get("part_versions", parts)
    settings = {key: value for key, value in settings.items() if not key.startswith(VERSION)}
    return {**settings, **_versions(parts)}


def changed(before: Mapping[str, Any], now: Mapping[str, Any], *, reproducible: bool) -> list[Change]:
    """Return the settings that differ, each with the reason if the run cannot continue with the change.

    A setting that a newer version has added had its default before, so it has not changed. Neither has the version of
    a part that the previous start did not use. Runs from before part versions were recorded have used version 1.

    Args:
        before: settings of the previous start.
        now: settings of this start.
        reproducible: whether the run is in reproducible mode.
    """
    recorded = any(key.startswith(VERSION) for key in before)
    if not recorded:
        before = {**before, **{key: 1 for key in now if key.startswith(VERSION)}}
    reasons = {**REFUSED, **(REFUSED_IF_REPRODUCIBLE if reproducible else {})}
    changes = []
    for key in sorted(now):
        moved = key.startswith("data.mixture.") and key.endswith(".shards")  # a copy elsewhere will do
        if key not in before or before[key] == now[key] or moved:
            continue
        reason = "" if _below(key, FREE_PARTS_OF_MODEL) else next(
            (why for name, why in reasons.items() if _below(key, (name,))), "")
        if key.endswith(CODE):
            reason = "its source has changed"
        changes.append(Change(key, before[key], now[key], reason))
    return changes


def _changed_code(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the commit and the versions of packages that differ from those of the newest start in run.json."""
    commit = run.get("commit", "")
    packages = dict(run.get("versions", {}))
    for start in run.get("starts", ()):
        commit = start.get("commit", commit)
        packages |= start.get("versions", {})
    newer = {name: version for name, version in versions(PACKAGES).items() if packages.get(name) != version}
    current_commit = git_commit()
    return {**({"versions": newer} if newer else {}),
            **({"commit": current_commit} if current_commit != commit else {})}


def _changed_parts(run: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Return the versions of all parts under "part_versions", unless they are those of the newest start in run.json."""
    before = {key: value for key, value in last_settings(run).items() if key.startswith(VERSION)}
    now = config.versions()
    return {} if before == _versions(now) else {"part_versions": now}


def _versions(parts: Mapping[str, int]) -> dict[str, Any]:
    return {f"{VERSION}{part}": version for part, version in parts.items()}


def _sources(hashes: Mapping[str, str]) -> dict[str, Any]:
    return {f"{name}{CODE}": value for name, value in hashes.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{key}.")
        else:
            flat[key] = list(value) if isinstance(value, tuple) else value
    return flat


def _below(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
