"""Which rows a rank reads for a step, and the record of what it read.

The global batch of a step is what `positions` says. It is cut into V slices for V virtual ranks; data rank r of N runs
the virtual ranks [r V/N, (r+1) V/N), each in micro-batches of the same shape. Ranks that share a copy of the model
(tensor, context, pipeline) have one data rank and read the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from tidewheel.models.decoder import IGNORED, next_tokens
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.loader import Loader
from tidewheel.shards.reader import Rows
from tidewheel.shards.source import Source
from tidewheel.train.batch_config import BatchConfig
from tidewheel.train.collectives import Collectives
from tidewheel.train.parallel.mesh import DATA, Mesh
from tidewheel.train.positions import Positions
from tidewheel.train.step import MicroBatch


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of one global batch, on the training device."""

    micro_batches: list[MicroBatch]
    ids: list[str]
    """Sequence ids ("shard:row", of a mixture "domain/shard:row") in order of position."""


class BatchReader:
    """This rank's part of each global batch, read ahead by a thread."""

    def __init__(self, loader: Loader, config: BatchConfig, positions: Positions, data_rank: int, data_size: int, *,
                 device: torch.device, steps: int, ahead: int) -> None:
        self._loader, self._config, self._positions, self._device = loader, config, positions, device
        self._rank, self._size, self._steps, self._ahead = data_rank, data_size, steps, ahead
        self._pending: dict[int, Future[RankBatch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def read(self, step: int) -> RankBatch:
        """The batch of `step`, waiting for it if need be; begins to read the next ones."""
        for wanted in range(step, min(step + self._ahead, self._steps) + 1):
            if wanted not in self._pending:
                self._pending[wanted] = self._thread.submit(self._load, wanted)
        return self._pending.pop(step).result()

    def start_over(self, positions: Positions) -> None:
        """Forget what was read ahead: steps take other positions from now on."""
        self._positions = positions
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()

    def settle(self) -> None:
        """Return once all shards that were read are known to be intact; ShardError when one is not."""
        self._loader.settle()

    def close(self) -> None:
        """Stop reading ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._loader.close()

    def _load(self, step: int) -> RankBatch:
        positions = self._positions.of(step)
        per_rank, per_virtual = len(positions) // self._size, len(positions) // self._config.virtual_ranks
        rows = self._loader.batch(positions[self._rank * per_rank:(self._rank + 1) * per_rank])
        micros = []
        for start in range(0, per_rank, self._config.micro_sequences):
            virtual = (self._rank * per_rank + start) // per_virtual
            part = slice(start, start + self._config.micro_sequences)
            micros.append(micro_batch(rows, part, virtual, self._device))
        return RankBatch(micros, list(rows.ids))


def micro_batch(rows: Rows, part: slice, virtual_rank: int, device: torch.device) -> MicroBatch:
    """Rows `part` as tensors on `device`, with the targets."""
    tokens = torch.from_numpy(rows.tokens[part].astype(np.int64))
    segments = torch.from_numpy(rows.segment_ids[part].astype(np.int64))
    positions = torch.from_numpy(rows.positions[part].astype(np.int64))
    targets = next_tokens(tokens, segments)
    if rows.loss_mask is not None:  # a target counts when the token to predict is marked
        wanted = torch.from_numpy(rows.loss_mask[part].astype(bool))
        targets[:, :-1] = torch.where(wanted[:, 1:], targets[:, :-1], IGNORED)
    return MicroBatch(
        tokens=tokens.to(device), positions=positions.to(device), segment_ids=segments.to(device),
        targets=targets.to(device), virtual_rank=virtual_rank, num_tokens=int(rows.lengths[part].sum()),
        num_targets=int((targets >= 0).sum()))


class BatchDigest:
    """Digest of the ids all data ranks loaded for a step, in order of position.

    Ids travel as one int64 each, shard index << 32 | row, and are spelled out again on rank 0. Shards are numbered
    through all domains.
    """

    def __init__(self, source: Source, collectives: Collectives, mesh: Mesh) -> None:
        # of the ranks that read the same rows only the first sends them
        self._sends, self._group = mesh.leads, mesh.group(*DATA)
        self._names = [domain.prefix + shard.name for domain in source.domains for shard in domain.manifest.shards]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._collectives = collectives

    def of(self, ids: Sequence[str]) -> str | None:
        """Called by all ranks with what each loaded; the digest on rank 0, None elsewhere."""
        packed = torch.tensor([self._pack(sequence) for sequence in ids], dtype=torch.int64)
        gathered = self._collectives.gather(packed, self._group) if self._sends else None
        if gathered is None:
            return None
        return sequence_digest([f"{self._names[code >> 32]}:{code & 0xFFFFFFFF}" for code in gathered.tolist()])

    def _pack(self, sequence: str) -> int:
        name, _, row = sequence.rpartition(":")
        return self._index[name] << 32 | int(row)
