"""The loss of each range of positions in a document: whether a model uses a context, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tidewheel.errors import ConfigError
from tidewheel.models.decoder import IGNORED
from tidewheel.train.batches import micro_batch
from tidewheel.train.evaluation import ValidationSet
from tidewheel.train.parallel import ParallelModel


@dataclass(frozen=True)
class PositionScore:
    """The loss at some positions.

    Args:
        start: first position in its document, from 0.
        end: behind the last position.
        loss: nats per predicted token; None: no document is as long.
        tokens: predicted tokens.
    """

    start: int
    end: int
    loss: float | None
    tokens: int


@torch.no_grad()
def by_position(model: ParallelModel, data: ValidationSet, edges: Sequence[int], sequences: int = 0,
                rows_at_once: int = 1) -> list[PositionScore]:
    """Return the losses of ranges of positions, from 0 to the first edge, and so on.

    Args:
        model: on one device.
        data: an open validation set.
        edges: ends of the ranges, rising.
        sequences: number of rows from the beginning of the set; 0: all.
        rows_at_once: rows of a forward pass.

    Raises:
        ConfigError: the edges do not rise.
    """
    if not edges or any(end <= start for start, end in zip((0, *edges), edges)):
        raise ConfigError(f"the ends of the ranges must rise from above 0, got {list(edges)}", where="--positions",
                          fix="give --positions 128,256,512")
    counts = [shard.rows for shard in data.shards.manifest.shards]
    shards = np.repeat(np.arange(len(counts)), counts)
    rows = np.concatenate([np.arange(count) for count in counts])
    total = min(len(rows), sequences or len(rows))
    bounds = torch.tensor(edges, device=model.device)
    sums = torch.zeros(2, len(edges) + 1, dtype=torch.float64, device=model.device)
    for start in range(0, total, rows_at_once):
        part = slice(start, min(start + rows_at_once, total))
        micro = micro_batch(data.shards.rows(shards[part], rows[part]), slice(None), 0, model.device)
        logits = model(micro.tokens, micro.positions, micro.segment_ids)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), micro.targets.flatten(), ignore_index=IGNORED,
                                 reduction="none")
        known = micro.targets.flatten() != IGNORED
        ranges = torch.bucketize(micro.positions.flatten()[known], bounds, right=True)
        sums[0].index_add_(0, ranges, losses[known].double())
        sums[1].index_add_(0, ranges, torch.ones_like(losses[known], dtype=torch.float64))
    model.reshard()
    nats, tokens = sums.cpu().numpy()
    return [PositionScore(start, end, float(nats[i] / tokens[i]) if tokens[i] else None, int(tokens[i]))
            for i, (start, end) in enumerate(zip((0, *edges), edges))]
