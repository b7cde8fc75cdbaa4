"""Validate by domain, with the same result for every number of ranks and every layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidewheel.shards.manifest import PARTS
from tidewheel.shards.pairs import PairSet, open_set
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.rollouts import RolloutSet
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.batches import micro_batch
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.length_groups import cut, longest, padded_length
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import precision_context


@dataclass(frozen=True)
class Score:
    """How well the model predicts a validation set; of pairs, how well it does by the objective."""

    loss: float
    """Cross-entropy in nats per predicted token; of pairs, the objective's loss per pair."""
    perplexity: float | None
    """exp(loss); None for pairs."""
    bits_per_byte: float | None
    """Bits of all predicted tokens, divided by the UTF-8 bytes of their text: comparable between tokenizers. The end of
    a document costs bits and has no bytes. The first token of a document is not predicted and does not count. None if
    no predicted token has bytes."""
    tokens: int
    """Predicted tokens; of pairs, their number."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of pairs, the objective's metrics per pair."""

    @classmethod
    def of_pairs(cls, sums: Sequence[float], pairs: int, names: Sequence[str]) -> Score:
        """Return the score of sums over pairs.

        Args:
            sums: the objective's loss, then its metrics.
            pairs: number of pairs.
            names: of the metrics.
        """
        loss, *metrics = [value / pairs for value in sums]
        return cls(loss, None, None, pairs, dict(zip(names, metrics)))

    def figures(self) -> dict[str, Any]:
        """Return JSON values, the metrics among them."""
        values = asdict(self)
        metrics = values.pop("metrics")
        return {**values, **metrics}

    def shown(self) -> dict[str, Any]:
        """Return rounded figures by their names for people."""
        if self.perplexity is None:
            return {"loss": round(self.loss, 4), **{name.replace("_", " "): round(value, 4)
                    for name, value in self.metrics.items()}, "pairs": self.tokens}
        bits = None if self.bits_per_byte is None else round(self.bits_per_byte, 4)
        return {"loss": round(self.loss, 4), "perplexity": round(self.perplexity, 2), "bits per byte": bits,
                "tokens": self.tokens}

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
    shards: ShardSet | PairSet | RolloutSet
    byte_lengths: torch.Tensor
    """[V] int64 on the training device, see `Encoder.byte_lengths`."""

    @classmethod
    def open(cls, name: str, uri: str, cache: Path | None, device: torch.device, *, parts: int = PARTS,
             reference: str = "") -> ValidationSet:
        """Open a set and its tokenizer.

        Args:
            name: name of its domain; "" for a single set.
            uri: the set's folder.
            cache: local folder for remote shards; None for no cache.
            device: the training device.
            parts: see `shards.pairs.open_set`, also for `reference`.
            reference: folder of the reference model's log-probabilities.

        Raises:
            ShardError: the set or its tokenizer cannot be read.
        """
        shards = open_set(uri, cache, parts=parts, reference=reference)
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
    return [ValidationSet.open(name, uri, cache, device, parts=config.objective.parts, reference=config.data.reference)
            for name, uri in sorted(config.data.validation_sets.items())]


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
    if config.objective.parts > 1:
        return {validation_set.name: Score.of_pairs(values, int(pairs), config.objective.METRICS)
                for validation_set, (pairs, *values) in zip(sets, totals)}
    return {validation_set.name: Score.of(nats, int(tokens), int(size))
            for validation_set, (nats, tokens, size) in zip(sets, totals)}


def overall(scores: Mapping[str, Score]) -> float:
    """Return the loss per predicted token, or per pair, over all sets together."""
    return sum(score.loss * score.tokens for score in scores.values()) / sum(score.tokens for score in scores.values())


def record(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return the figures of an evaluation for metrics.jsonl."""
    return {"validation_loss": overall(scores), "validation": {name: score.figures() for name, score in scores.items()}}


def add_average(figures: dict[str, Any], name: str, scores: Mapping[str, Score]) -> None:
    """Add the scores of an average of the parameters to `record`'s figures, as further validation sets.

    Args:
        figures: of the parameters themselves.
        name: of the average, such as "ema".
        scores: of the average, by name of the validation set.
    """
    figures["validation"] |= {f"{domain} {name}".strip(): score.figures() for domain, score in scores.items()}
    figures.setdefault("average_losses", {})[name] = overall(scores)


def _sums(model: ParallelModel, validation_set: ValidationSet, config: TrainConfig,
          collectives: Collectives) -> torch.Tensor:
    """Return sums over a set, [n, micro-batches] fp64; 0 for other ranks' micro-batches.

    They are nats, predicted tokens and bytes of text; of pairs, their number, and the objective's loss and metrics.
    """
    counts = [shard.rows for shard in validation_set.shards.manifest.shards]
    shards = np.repeat(np.arange(len(counts)), counts)
    rows = np.concatenate([np.arange(count) for count in counts])
    total = min(len(rows), config.evaluation.sequences or len(rows))
    size = min(config.batch.micro_sequences, total)
    count = math.ceil(total / size)
    mesh = model.mesh
    of_pairs = config.objective.parts > 1
    sums = torch.zeros(2 + len(config.objective.METRICS) if of_pairs else 3, count, dtype=torch.float64)
    for first in range(0, count, mesh.data_size):
        index = first + mesh.data_rank
        begin = min(index, count - 1) * size
        part = slice(begin, min(begin + size, total))
        read = validation_set.shards.rows(shards[part], rows[part])
        if of_pairs:
            read = cut(read, slice(None), padded_length(longest(read), config.batch.pad_to_multiple_of, read.width))
        micro = micro_batch(read, slice(None), 0, collectives.device)
        loss = model.evaluate(micro, precision_context(collectives.device, config.precision))
        if index >= count:
            continue
        if of_pairs:
            sums[0, index] = config.objective.count(micro) if mesh.leads else 0
            sums[1:, index] = loss.double().cpu()
            continue
        sums[0, index] = loss.double().cpu()
        if mesh.leads:
            targets = micro.targets[micro.targets >= 0]
            sums[1, index], sums[2, index] = len(targets), int(validation_set.byte_lengths[targets].sum())
    return sums
