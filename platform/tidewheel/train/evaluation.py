"""Validate by domain, with the same result for every number of ranks and every layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidewheel.shards.reader import ShardSet
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.batches import micro_batch
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import precision_context


@dataclass(frozen=True)
class Score:
    """How well the model predicts a validation set."""

    loss: float
    """Cross-entropy in nats per predicted token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Bits of all predicted tokens, divided by the UTF-8 bytes of their text: comparable between tokenizers. The end of
    a document costs bits and has no bytes. The first token of a document is not predicted and does not count. None if
    no predicted token has bytes."""
    tokens: int
    """Predicted tokens."""

    @classmethod
    def of(cls, nats: float, tokens: int, text_bytes: int) -> Score:
        """Return the score of sums over a set.

        Args:
            nats: cross-entropy of all predicted tokens.
            tokens: predicted tokens.
            text_bytes: UTF-8 bytes of their text.
        """
        loss = nats / max(1, tokens)
        bits_per_byte = nats / math.log(2) / text_bytes if text_bytes else None
        return cls(loss, math.exp(min(loss, 700.0)), bits_per_byte, tokens)


@dataclass(frozen=True)
class ValidationSet:
    """An open validation set."""

    name: str
    """Name of its domain; "" for a single set."""
    shards: ShardSet
    byte_lengths: torch.Tensor
    """[V] int64 on the training device, see `Encoder.byte_lengths`."""

    @classmethod
    def open(cls, name: str, uri: str, cache: Path | None, device: torch.device) -> ValidationSet:
        """Open a set and its tokenizer.

        Args:
            name: name of its domain; "" for a single set.
            uri: the set's folder.
            cache: local folder for remote shards; None for no cache.
            device: the training device.

        Raises:
            ShardError: the set or its tokenizer cannot be read.
        """
        shards = ShardSet.open(uri, cache)
        manifest = shards.manifest
        sizes = torch.zeros(manifest.vocabulary_size, dtype=torch.int64)
        known = torch.from_numpy(of_manifest(shards.store, manifest.tokenizer).byte_lengths())[:len(sizes)]
        sizes[:len(known)] = known
        return cls(name, shards, sizes.to(device))


def open_sets(config: TrainConfig, device: torch.device) -> list[ValidationSet]:
    """Open the validation sets of a run, sorted by name.

    Raises:
        ShardError: a set or its tokenizer cannot be read.
    """
    cache = Path(config.data.cache) if config.data.cache else None
    return [ValidationSet.open(name, uri, cache, device) for name, uri in sorted(config.data.validation_sets.items())]


@torch.no_grad()
def validate(model: ParallelModel, sets: list[ValidationSet], config: TrainConfig,
             collectives: Collectives) -> dict[str, Score]:
    """Return the score of each set (of its first `evaluation.sequences` rows) by name. All ranks call it together.

    Data rank i mod N computes micro-batch i of a set. The ranks share one sum per micro-batch, so that the total is
    added in one fixed order. A rank without micro-batches left repeats its last rows without counting them, because
    FSDP gathers weights in every forward pass.

    Args:
        model: this rank's part of the model.
        sets: the open validation sets.
        config: the run's settings.
        collectives: over all ranks.
    """
    sums = [_sums(model, validation_set, config, collectives) for validation_set in sets]
    model.reshard()
    whole = collectives.to_host(collectives.sum(torch.cat(sums, dim=1)))
    totals = [part.sum(dim=1).tolist() for part in whole.split([part.shape[1] for part in sums], dim=1)]
    return {validation_set.name: Score.of(nats, int(tokens), int(size))
            for validation_set, (nats, tokens, size) in zip(sets, totals)}


def overall(scores: Mapping[str, Score]) -> float:
    """Return the nats per predicted token over all sets together."""
    return sum(score.loss * score.tokens for score in scores.values()) / sum(score.tokens for score in scores.values())


def record(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return the figures of an evaluation for metrics.jsonl."""
    return {"validation_loss": overall(scores), "validation": {name: asdict(score) for name, score in scores.items()}}


def _sums(model: ParallelModel, validation_set: ValidationSet, config: TrainConfig,
          collectives: Collectives) -> torch.Tensor:
    """Return nats, predicted tokens and bytes of text, [3, micro-batches] fp64; 0 for other ranks' micro-batches."""
    counts = [shard.rows for shard in validation_set.shards.manifest.shards]
    shards = np.repeat(np.arange(len(counts)), counts)
    rows = np.concatenate([np.arange(count) for count in counts])
    total = min(len(rows), config.evaluation.sequences or len(rows))
    size = min(config.batch.micro_sequences, total)
    count = math.ceil(total / size)
    mesh = model.mesh
    sums = torch.zeros(3, count, dtype=torch.float64)
    for first in range(0, count, mesh.data_size):
        index = first + mesh.data_rank
        begin = min(index, count - 1) * size
        part = slice(begin, min(begin + size, total))
        micro = micro_batch(validation_set.shards.rows(shards[part], rows[part]), slice(None), 0, collectives.device)
        loss = model.evaluate(micro, precision_context(collectives.device, config.precision))
        if index >= count:
            continue
        sums[0, index] = loss.double().cpu()
        if mesh.leads:
            targets = micro.targets[micro.targets >= 0]
            sums[1, index], sums[2, index] = len(targets), int(validation_set.byte_lengths[targets].sum())
    return sums
