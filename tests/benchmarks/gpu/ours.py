"""Tidewheel's side: the model, optimizer and step of its training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.gpu.case import SHAPES, Case, Documents, batches
from tests.benchmarks.gpu.timing import measure
from tidewheel.config import build
from tidewheel.models.families import Llama
from tidewheel.shards.reader import Rows
from tidewheel.train import parallel
from tidewheel.train.batches import micro_batch
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.precision import fp32_products
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, train_step


class Ours:
    """A model in training. This class alone knows how a step is made from the parts of the training loop.

    Args:
        case: model, batch and settings.
        runtime: rank and device; default: this process alone.
    """

    def __init__(self, case: Case, runtime: Runtime | None = None) -> None:
        self.case, self.config = case, configuration(case)
        runtime = runtime or Runtime(device=torch.device(case.device))
        self.model = parallel.build(self.config, case.vocabulary, runtime)
        self.optimizer = build_optimizer(self.model, self.config.optimizer)
        parallel.init_weights(self.model, 0)
        self.optimizer.started()
        self.optimizer.set_learning_rate(case.learning_rate)
        self._collectives = Collectives(runtime)
        self._batches = [self._micro_batches(documents) for documents in batches(case)]

    def step(self, index: int, before_update: Callable[[], None] = lambda: None) -> float:
        """Do a step and return its loss.

        Args:
            index: chooses the batch.
            before_update: called before any parameter changes.
        """
        result = train_step(self.model, self.optimizer, self._batches[index % len(self._batches)], self._collectives,
                            virtual_ranks=self.config.batch.virtual_ranks, clip_norm=self.config.optimizer.clip_norm,
                            precision=self.config.precision, before_update=before_update)
        return result.loss

    def state(self) -> dict[str, Any]:
        """Return the tensors that a checkpoint holds."""
        return training_state(self.model, self.optimizer)

    def _micro_batches(self, documents: Documents) -> list[MicroBatch]:
        batch = self.config.batch
        rows = Rows(documents.tokens, _lengths(documents), documents.documents, documents.positions, ids=[])
        numbers = self.model.share.of(batch.global_sequences // batch.micro_sequences)
        per_virtual_rank = batch.global_sequences // batch.virtual_ranks // batch.micro_sequences
        parts = [slice(number * batch.micro_sequences, (number + 1) * batch.micro_sequences) for number in numbers]
        return [micro_batch(rows, part, number // per_virtual_rank, torch.device(self.case.device))
                for number, part in zip(numbers, parts)]


def _lengths(documents: Documents) -> Any:
    return (documents.positions >= 0).sum(axis=1)


def configuration(case: Case) -> TrainConfig:
    """Return the configuration of a run that does such steps."""
    fp8 = {"fp8": {"emulate": True, "layers": "all"}} if case.device == "cpu" else {}
    micro_batches = case.virtual_ranks * -(-case.micro_batches // case.virtual_ranks)  # equally many for each
    batch = {"global_sequences": case.rows, "micro_sequences": case.rows // micro_batches,
             "virtual_ranks": case.virtual_ranks}
    settings = dict(case.settings)
    shape = with_experts(SHAPES[case.shape], case.experts) if case.experts else SHAPES[case.shape]
    model = {**shape, "vocabulary_size": case.vocabulary, **settings.pop("model", {})}
    values: dict[str, Any] = {"model": model, "precision": "bf16", "compile": case.compiled,
                              "optimizer": {"learning_rate": case.learning_rate}, "batch": batch, **settings}
    if values["precision"] == "fp8":
        values |= fp8
    return build(TrainConfig, values)


def with_experts(shape: dict[str, Any], experts: int) -> dict[str, Any]:
    """Return the settings of a mixture of experts with the active FLOPs of a dense shape.

    Args:
        shape: settings of `Llama`.
        experts: of each layer.
    """
    dense = build(Llama, shape)
    kept = ("dim", "num_layers", "num_heads", "num_kv_heads", "max_sequence_length", "rope_theta", "norm_epsilon")
    return {**{name: getattr(dense, name) for name in kept}, "kind": "mixtral", "ffn_dim": dense.ffn_width // 2,
            "num_experts": experts, "experts_per_token": 2}


def train(case: Case) -> dict[str, Any]:
    """Measure Tidewheel's step."""
    reproducible = case.settings.get("reproducible", False)
    with fp32_products(torch.device(case.device), not reproducible):
        if not reproducible:
            return measure(Ours(case).step, case)
        with deterministic_kernels():
            return measure(Ours(case).step, case)
