"""Scores of a checkpoint of any layout on validation sets, in one process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.adapters import base_of
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest, step_of
from tidewheel.checkpoint.verify import locate
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.inference.adapters import read_adapters
from tidewheel.inference.positions import PositionScore, by_position
from tidewheel.models.adapting import merge
from tidewheel.models.decoder import Decoder
from tidewheel.parts import as_json, is_own
from tidewheel.storage import Store
from tidewheel.train import evaluation, parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.evaluation import Score, ValidationSet
from tidewheel.train.local_device import local_device
from tidewheel.train.optim.build import model_state
from tidewheel.train.parallel import adapter_weights
from tidewheel.train.precision import fp32_products
from tidewheel.train.runtime import Runtime

logger = logging.getLogger(__name__)
ONE_PROCESS = ("parallel", "compile", "compile_cache", "run_ahead", "memory", "elastic", "optimizer", "schedule",
               "metrics", "callbacks")
"""Settings of a run that a single evaluating process does not use."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one checkpoint.

    Args:
        checkpoint: its URI.
        step: the step that it was saved at.
        scores: by validation set; the name of a single set is "".
    """

    checkpoint: str
    step: int
    scores: dict[str, Score]

    @property
    def loss(self) -> float:
        """Return the loss per predicted token, or per pair, over all sets together."""
        return evaluation.overall(self.scores)


class Evaluator:
    """A model and validation sets, for one checkpoint after another.

    Args:
        uri: a run, or one of its checkpoints.
        data: validation sets by domain, {"": URI} for a single one; default: the run's own.
        sequences: number of rows from the beginning of each set, 0: all; default: as the run's configuration says.
        device: default: the first GPU if there is one, else the CPU.

    Raises:
        CheckpointError: no checkpoint can be read.
        ConfigError: the run has no validation set and the caller gave none, or a set has another vocabulary.
        ShardError: a validation set cannot be read.
    """

    def __init__(self, uri: str, *, data: Mapping[str, str] | None = None, sequences: int | None = None,
                 device: str = "") -> None:
        run, checkpoints, name = locate(uri)
        self._manifest = read_manifest(checkpoints, name)
        model, vocabulary_size = conversion.model_of(self._manifest, checkpoints.at(name), any_head=True)
        self._config = _config(run, self._manifest, as_json(model), data, sequences)
        if not self._config.data.validation_sets:
            raise ConfigError("the run has no validation set", where=run.uri,
                              fix="give one: --data URI, the validation/ folder that a pipeline wrote")
        eval_device = local_device(device)
        if eval_device.type == "cpu" and self._config.precision == "fp8":
            self._config = self._config.model_copy(update={"precision": "bf16"})
        self._runtime = Runtime(device=eval_device)
        self._sets = evaluation.open_sets(self._config, eval_device)
        for validation_set in self._sets:
            _check_vocabulary(validation_set, vocabulary_size)
        self._model = parallel.build(self._config, vocabulary_size, self._runtime)
        self._weights = model_state(self._model)
        if (base := base_of(self._manifest)) is not None:
            adapter_weights.set_base(self._model, lambda values: base.fill(model, values))

    def evaluate(self, uri: str) -> Evaluation:
        """Return the scores of one checkpoint of the run, after checking the hash of every file.

        Args:
            uri: the checkpoint, or the run for its newest complete one.

        Raises:
            CheckpointError: there is no complete checkpoint, or it is damaged.
        """
        checkpoints, name = self._load(uri)
        return self._evaluate(checkpoints.at(name), step_of(name))

    def evaluate_adapters(self, uri: str, adapters: Mapping[str, str]) -> dict[str, Evaluation]:
        """Return the scores of a checkpoint alone, "", and with each of its adapters, by their names.

        The base is in memory once. Call it once: afterwards the model has the adapters.

        Args:
            uri: as for `evaluate`, of the base.
            adapters: URIs by name; see `read_adapters`.

        Raises:
            CheckpointError: a checkpoint cannot be read.
            ConfigError: an adapter is of another base.
        """
        checkpoints, name = self._load(uri)
        where = checkpoints.at(name)
        (model,) = self._model.parts
        assert isinstance(model, Decoder)
        merge.add_several(model, read_adapters(adapters, read_manifest(checkpoints, name), model.config, where))
        results: dict[str, Evaluation] = {}
        for adapter in ("", *adapters):
            with merge.rows(model, [adapter]):
                results[adapter] = self._evaluate(where, step_of(name))
        return results

    def _evaluate(self, checkpoint: str, step: int) -> Evaluation:
        tf32 = self._config.tf32 and not self._config.reproducible
        with fp32_products(torch.device(self._runtime.device), tf32):
            scores = evaluation.validate(self._model, self._sets, self._config, Collectives(self._runtime))
        result = Evaluation(checkpoint, step, scores)
        logger.info("evaluated %s: loss %.4f", result.checkpoint, result.loss)
        return result

    def by_position(self, uri: str, edges: Sequence[int]) -> dict[str, list[PositionScore]]:
        """Return the losses of ranges of positions in their documents, by validation set.

        Args:
            uri: as for `evaluate`.
            edges: ends of the ranges, rising; the first begins at 0.

        Raises:
            CheckpointError: there is no complete checkpoint, or it is damaged.
            ConfigError: the edges do not rise.
        """
        if self._config.objective.parts > 1:
            raise ConfigError("the run is of preference pairs, whose losses are of whole answers", where=uri,
                              fix="leave --positions out")
        self._load(uri)
        sequences = self._config.evaluation.sequences
        return {data.name: by_position(self._model, data, edges, sequences) for data in self._sets}

    def _load(self, uri: str) -> tuple[Store, str]:
        """Load a checkpoint's weights, and return the folder of checkpoints and its name."""
        _, checkpoints, name = locate(uri)
        CheckpointManager(checkpoints).load_from(checkpoints.at(name), {"model": self._weights})
        self._model.refresh()
        return checkpoints, name


def _config(run: Store, manifest: CheckpointManifest, model: dict[str, Any], data: Mapping[str, str] | None,
            sequences: int | None) -> TrainConfig:
    """Return the run's configuration for one process. An imported model has none; it gets the defaults."""
    values = run.read_json("run.json")["config"] if run.exists("run.json") else {}
    values = {key: value for key, value in values.items() if key not in ONE_PROCESS}
    if is_own(str(values.get("objective", {}).get("kind", ""))):
        del values["objective"]  # validation is the cross-entropy, which needs none of the user's code
    values["model"] = {**model, "init_from": ""}
    if data is not None:
        values["data"] = {"reference": values.get("data", {}).get("reference", ""),
                          "validation": dict(data) if "" not in data else data[""]}
    if sequences is not None:
        values["evaluation"] = {**values.get("evaluation", {}), "sequences": sequences}
    values["parameters"] = "fp32"  # bf16 weights are the same numbers in fp32
    return build(TrainConfig, values)


def _check_vocabulary(validation_set: ValidationSet, vocabulary_size: int) -> None:
    """Raise ConfigError unless the model has all tokens of the set."""
    needed = validation_set.shards.manifest.vocabulary_size
    if needed > vocabulary_size:
        raise ConfigError(f"validation set {validation_set.name or 'given'} has a vocabulary of {needed}, the model of "
                          f"{vocabulary_size}", where=validation_set.shards.store.uri,
                          fix="give a set that was packed with the model's tokenizer")
