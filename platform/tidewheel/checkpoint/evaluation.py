"""Validation loss of a checkpoint of any layout, in one process: afterwards, or beside the training."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tidewheel import jsonlog, storage
from tidewheel.checkpoint import exchange
from tidewheel.checkpoint.manager import CheckpointManager, OnEvent
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest, step_of
from tidewheel.checkpoint.verify import list_checkpoints, locate
from tidewheel.config import build
from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.jsonlog import BESIDE, JsonLog
from tidewheel.parts import as_json, is_own
from tidewheel.storage import Store
from tidewheel.train import evaluation, parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.evaluation import Score, ValidationSet
from tidewheel.train.runtime import Runtime

ONE_PROCESS = ("parallel", "compile", "compile_cache", "memory", "elastic", "optimizer", "schedule", "metrics",
               "callbacks")
"""Settings of a run that one process which evaluates has no use for."""

LOOK_BACK = 100_000
"""Records among which the newest evaluation is looked for; without one the newest checkpoint is evaluated."""


@dataclass(frozen=True)
class Evaluation:
    """What was found."""

    checkpoint: str
    """Its URI."""
    step: int
    scores: dict[str, Score]
    """By validation set; "" for a single one."""

    @property
    def loss(self) -> float:
        """Nats per predicted token over all sets together."""
        return evaluation.overall(self.scores)


class Evaluator:
    """A model with one checkpoint's weights after the other, and the validation sets.

    Args:
        uri: a run, or one of its checkpoints.
        data: validation sets by domain, {"": URI} for a single one; default: the run's own.
        sequences: take the first so many rows of each set, 0: all; default: as the run's configuration says.
        device: default: the first GPU if there is one, else the CPU.

    Raises:
        CheckpointError: there is no checkpoint that can be read.
        ConfigError: no validation set is known.
        ShardError: one cannot be read, or was packed for another vocabulary.
    """

    def __init__(self, uri: str, *, data: Mapping[str, str] | None = None, sequences: int | None = None,
                 device: str = "") -> None:
        run, place, name = locate(uri)
        self._manifest = read_manifest(place, name)
        model, vocabulary_size = exchange.model_of(self._manifest, place.at(name))
        self._config = _config(run, self._manifest, as_json(model), data, sequences)
        if not self._config.data.validation_sets:
            raise ConfigError("the run has no validation set", where=run.uri,
                              mend="give one: --data URI, the validation/ folder that a pipeline wrote")
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if chosen.type == "cpu" and self._config.precision == "fp8":
            self._config = self._config.model_copy(update={"precision": "bf16"})
        self._runtime = Runtime(device=chosen)
        self._sets = evaluation.open_sets(self._config, chosen)
        for each in self._sets:
            _fits(each, vocabulary_size)
        self._model = parallel.build(self._config, vocabulary_size, self._runtime)
        self._weights = {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def evaluate(self, uri: str) -> Evaluation:
        """The score of one checkpoint of the run, or of the run's newest complete one; every file's hash is checked.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        _, place, name = locate(uri)
        CheckpointManager(place).load_from(place.at(name), {"model": self._weights})
        self._model.refresh()
        scores = evaluation.validate(self._model, self._sets, self._config, Collectives(self._runtime))
        return Evaluation(place.at(name), step_of(name), scores)


def _config(run: Store, manifest: CheckpointManifest, model: dict[str, Any], data: Mapping[str, str] | None,
            sequences: int | None) -> TrainConfig:
    """The run's configuration for one process; of an imported model, which has none, the defaults."""
    values = run.read_json("run.json")["config"] if run.exists("run.json") else {}
    values = {key: value for key, value in values.items() if key not in ONE_PROCESS}
    if is_own(str(values.get("objective", {}).get("kind", ""))):
        del values["objective"]  # validation is the cross-entropy, which needs none of the user's code
    values["model"] = {**model, "init_from": ""}
    if data is not None:
        values["data"] = {"validation": dict(data) if "" not in data else data[""]}
    if sequences is not None:
        values["evaluation"] = {**values.get("evaluation", {}), "sequences": sequences}
    values["parameters"] = "fp32"  # bf16 weights are the same numbers in fp32
    return build(TrainConfig, values)


def _fits(each: ValidationSet, vocabulary_size: int) -> None:
    theirs = each.shards.manifest.vocabulary_size
    if theirs > vocabulary_size:
        raise ConfigError(f"validation set {each.name or 'given'} has a vocabulary of {theirs}, the model of "
                          f"{vocabulary_size}", where=each.shards.store.uri,
                          mend="give a set that was packed with the model's tokenizer")


def watch(run_uri: str, *, every_steps: int, ended: threading.Event, on_event: OnEvent, device: str = "",
          seconds: float = 2.0) -> None:
    """Evaluate a run's checkpoints as they are committed, into its metrics.jsonl, until `ended`.

    A checkpoint is due when it is the newest and `every_steps` have passed since the last evaluation, so that a slow
    evaluation never lags behind. What cannot be evaluated is told once for each reason, and looked at again.

    Args:
        run_uri: the run's folder; it need not exist yet.
        on_event: called with ("evaluation_failed", {"reason": text}).
        seconds: time between two looks.
    """
    run = storage.store(run_uri)
    log = JsonLog(run, "metrics.jsonl", order=BESIDE)
    done: int | None = None
    evaluator: Evaluator | None = None
    told = ""
    while not ended.wait(seconds):
        try:
            if done is None:
                done = _last_evaluation(run)
            newest = [info for info in list_checkpoints(run.child("checkpoints")) if info.complete][-1:]
            step = newest[0].step if newest else 0
            if step // every_steps <= done // every_steps:
                continue
            evaluator = evaluator or Evaluator(run_uri, device=device)
            found = evaluator.evaluate(run.at(f"checkpoints/{newest[0].name}"))
            done = found.step
            log.append({"time": time.time(), "step": found.step, **evaluation.record(found.scores)})
            log.flush()
        except TidewheelError as error:  # retired meanwhile, damaged, or the store is away: the next one may do
            if str(error) != told:
                told = str(error)
                on_event("evaluation_failed", {"reason": told[:300]})


def _last_evaluation(run: Store) -> int:
    """Step of the newest evaluation among the run's newest metrics, 0 when there is none."""
    newest = itertools.islice(jsonlog.newest_first(run, "metrics.jsonl"), LOOK_BACK)
    return next((int(line["step"]) for line in newest if "validation_loss" in line), 0)
