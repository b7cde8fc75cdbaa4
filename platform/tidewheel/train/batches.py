"""Which rows a rank reads for a step, and the record of what it read.

The global batch of a step is what `positions` says. It is cut into V slices for V virtual ranks, and these into
micro-batches of the same shape, of which each data rank computes its `MicroBatchShare`: usually the virtual ranks
[r V/N, (r+1) V/N). Ranks that share a copy of the model (tensor, context, pipeline) have one data rank and read the
same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch

from tidewheel.daemon import DaemonThread, result
from tidewheel.models.decoder import IGNORED, next_tokens
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.loader import Loader
from tidewheel.shards.manifest import Manifest
from tidewheel.shards.reader import Rows
from tidewheel.shards.source import Source
from tidewheel.time_limit import TimeLimit
from tidewheel.train.batch_config import BatchConfig
from tidewheel.train.collectives import Collectives
from tidewheel.train.micro_batch_share import MicroBatchShare
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
    """This rank's part of each global batch, read ahead by a thread.

    Args:
        limit: of the generation; when it ends, nobody waits for a batch any more.
    """

    def __init__(self, loader: Loader, config: BatchConfig, positions: Positions, share: MicroBatchShare, *,
                 device: torch.device, steps: int, ahead: int, limit: TimeLimit | None = None) -> None:
        self._loader, self._config, self._positions, self._device = loader, config, positions, device
        self._share, self._steps, self._ahead = share, steps, ahead
        self._pending: dict[int, Future[RankBatch]] = {}
        self._thread, self._limit = DaemonThread("batches"), limit or TimeLimit()

    def read(self, step: int) -> RankBatch:
        """The batch of `step`, waiting for it if need be; begins to read the next ones."""
        reach = self._loader.reach
        for wanted in range(step, min(step + self._ahead, self._steps) + 1):
            if wanted > step and reach is not None and self._positions.end(wanted) > reach:
                break  # not there yet
            if wanted not in self._pending:
                self._pending[wanted] = self._thread.submit(self._load, wanted)
        return result(self._pending.pop(step), self._limit)

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
        """Stop reading ahead. A read that is under way is left to end by itself: it may hang in storage."""
        self._thread.stop(wait=False)
        self._loader.close()

    def _load(self, step: int) -> RankBatch:
        with self._limit.applied():
            return self._read(step)

    def _read(self, step: int) -> RankBatch:
        positions, size = self._positions.of(step), self._config.micro_sequences
        per_virtual = len(positions) // self._config.virtual_ranks
        mine = places(self._share, len(positions), size)
        rows = self._loader.batch(positions[mine])
        micros = [micro_batch(rows, slice(start, start + size), int(mine[start]) // per_virtual, self._device)
                  for start in range(0, len(mine), size)]
        return RankBatch(micros, list(rows.ids))


def places(share: MicroBatchShare, sequences: int, micro_sequences: int) -> np.ndarray:
    """Which sequences of a global batch of so many are a data rank's, in the order in which it reads them: int64."""
    numbers = np.array(share.of(sequences // micro_sequences), dtype=np.int64)
    return (numbers[:, None] * micro_sequences + np.arange(micro_sequences)).ravel()


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

    def __init__(self, source: Source, collectives: Collectives, mesh: Mesh, share: MicroBatchShare,
                 micro_sequences: int) -> None:
        # of the ranks that read the same rows only the first sends them
        self._sends, self._group = mesh.leads, mesh.group(*DATA)
        self._share, self._micro_sequences = share, micro_sequences
        self._source, self._collectives = source, collectives
        self._manifest: Manifest | None = None

    def of(self, ids: Sequence[str]) -> str | None:
        """Called by all ranks with what each loaded; the digest on rank 0, None elsewhere."""
        self._number()
        packed = torch.tensor([self._pack(sequence) for sequence in ids], dtype=torch.int64)
        gathered = self._collectives.gather(packed, self._group) if self._sends else None
        if gathered is None:
            return None
        read = np.concatenate([places(replace(self._share, rank=rank), len(gathered), self._micro_sequences)
                               for rank in range(self._share.size)])
        in_order = gathered.numpy()[np.argsort(read)].tolist()
        return sequence_digest([f"{self._names[code >> 32]}:{code & 0xFFFFFFFF}" for code in in_order])

    def _number(self) -> None:
        """Number the shards that there are; of a set that grows, the new ones follow."""
        if self._manifest is not self._source.manifest:
            self._manifest = self._source.manifest
            self._names = [domain.prefix + shard.name for domain in self._source.domains
                           for shard in domain.manifest.shards]
            self._index = {name: index for index, name in enumerate(self._names)}

    def _pack(self, sequence: str) -> int:
        name, _, row = sequence.rpartition(":")
        return self._index[name] << 32 | int(row)
