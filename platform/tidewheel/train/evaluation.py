"""Validation by domain, the same for every number of ranks and every layout."""

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
    """Bits for all predicted tokens, over the UTF-8 bytes of text that they stand for: comparable between tokenizers.
    The end of a document costs bits and has no bytes; its first token is not predicted, so neither counts. None where
    no predicted token has bytes."""
    tokens: int
    """Predicted tokens."""

    @classmethod
    def of(cls, nats: float, tokens: int, text_bytes: int) -> Score:
        """From sums over the set."""
        loss = nats / max(1, tokens)
        bits_per_byte = nats / math.log(2) / text_bytes if text_bytes else None
        return cls(loss, math.exp(min(loss, 700.0)), bits_per_byte, tokens)


@dataclass(frozen=True)
class ValidationSet:
    """One set, opened."""

    name: str
    """Its domain; "" for a single set."""
    shards: ShardSet
    byte_lengths: torch.Tensor
    """[V] int64 on the training device, see `Encoder.byte_lengths`."""

    @classmethod
    def open(cls, name: str, uri: str, cache: Path | None, device: torch.device) -> ValidationSet:
        """The set at `uri`, with its tokenizer.

        Raises:
            ShardError: it or its tokenizer cannot be read.
        """
        shards = ShardSet.open(uri, cache)
        manifest = shards.manifest
        sizes = torch.zeros(manifest.vocabulary_size, dtype=torch.int64)
        known = torch.from_numpy(of_manifest(shards.store, manifest.tokenizer).byte_lengths())[:len(sizes)]
        sizes[:len(known)] = known
        return cls(name, shards, sizes.to(device))


def open_sets(config: TrainConfig, device: torch.device) -> list[ValidationSet]:
    """The validation sets of a run, in the order of their names; see `ValidationSet.open` for what it raises."""
    cache = Path(config.data.cache) if config.data.cache else None
    return [ValidationSet.open(name, uri, cache, device) for name, uri in sorted(config.data.validation_sets.items())]


@torch.no_grad()
def validate(model: ParallelModel, sets: list[ValidationSet], config: TrainConfig,
             collectives: Collectives) -> dict[str, Score]:
    """The score of each set (of its first `evaluation.sequences` rows), by name.

    Micro-batch i of a set is computed by data rank i mod N; sums come back as one entry per micro-batch, so the total
    is added in one fixed order. All ranks must call it together; a rank that has run out repeats its last rows,
    uncounted, because FSDP gathers weights in every forward pass.
    """
    found = [_sums(model, each, config, collectives) for each in sets]
    model.reshard()
    whole = collectives.sum(torch.cat(found, dim=1)).cpu()
    totals = [part.sum(dim=1).tolist() for part in whole.split([part.shape[1] for part in found], dim=1)]
    return {each.name: Score.of(nats, int(tokens), int(size)) for each, (nats, tokens, size) in zip(sets, totals)}


def overall(scores: Mapping[str, Score]) -> float:
    """Nats per predicted token over all sets together."""
    return sum(score.loss * score.tokens for score in scores.values()) / sum(score.tokens for score in scores.values())


def record(scores: Mapping[str, Score]) -> dict[str, Any]:
    """What metrics.jsonl says of an evaluation."""
    return {"validation_loss": overall(scores), "validation": {name: asdict(score) for name, score in scores.items()}}


def _sums(model: ParallelModel, each: ValidationSet, config: TrainConfig, collectives: Collectives) -> torch.Tensor:
    """[3, micro-batches] fp64: nats, predicted tokens and bytes of text, those of this rank, else 0."""
    counts = [shard.rows for shard in each.shards.manifest.shards]
    shards = np.repeat(np.arange(len(counts)), counts)
    rows = np.concatenate([np.arange(count) for count in counts])
    total = min(len(rows), config.evaluation.sequences or len(rows))
    size = min(config.batch.micro_sequences, total)
    number, mesh = math.ceil(total / size), model.mesh
    sums = torch.zeros(3, number, dtype=torch.float64)
    for first in range(0, number, mesh.data_size):
        index = first + mesh.data_rank
        begin = min(index, number - 1) * size
        part = slice(begin, min(begin + size, total))
        micro = micro_batch(each.shards.rows(shards[part], rows[part]), slice(None), 0, collectives.device)
        loss = model.evaluate(micro, precision_context(collectives.device, config.precision))
        if index >= number:
            continue
        sums[0, index] = loss.double().cpu()
        if mesh.leads:
            targets = micro.targets[micro.targets >= 0]
            sums[1, index], sums[2, index] = len(targets), int(each.byte_lengths[targets].sum())
    return sums
