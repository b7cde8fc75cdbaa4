"""Read a rank's rows of each step, and compute the digest of what all ranks read.

`Positions` gives the global batch of a step. It is cut into V slices for V virtual ranks, and these into
micro-batches of as many sequences. Each data rank computes its `MicroBatchShare` of them: usually the virtual ranks
[r V/N, (r+1) V/N). Ranks that share a copy of the model (tensor, context, pipeline) have one data rank and read the
same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tidewheel.daemon import DaemonThread
from tidewheel.models.decoder import IGNORED, next_tokens
from tidewheel.models.documents import Documents
from tidewheel.models.noise import EmbeddingNoise
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.loader import Loader
from tidewheel.shards.opened import Rows
from tidewheel.shards.source import Source
from tidewheel.time_limit import TimeLimit, result
from tidewheel.train.batch_config import BatchConfig
from tidewheel.train.collectives import Collectives, Later
from tidewheel.train.device_copies import DeviceCopies
from tidewheel.train.equal_attention import equal_costs
from tidewheel.train.length_groups import cut, longest, padded_length, similar_lengths
from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.objective import TopK
from tidewheel.train.parallel.mesh import DATA, Mesh
from tidewheel.train.positions import Positions
from tidewheel.train.step import MicroBatch, RolloutColumns

Noise = Callable[[np.ndarray, np.ndarray, int], EmbeddingNoise]
"""From segment ids [B, L], indices of rows in the global batch [B] and the step to the noise of these rows."""


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of one global batch, on the training device."""

    micro_batches: list[MicroBatch]
    ids: list[str]
    """Sequence ids ("shard:row", of a mixture "domain/shard:row") in the order in which they were read."""
    indices: np.ndarray
    """Index of each of them in the global batch, [n] int64; rising, unless `BatchConfig.reorders`."""


class BatchReader:
    """This rank's part of each global batch, read ahead by a thread, which also copies it to the device.

    Args:
        loader: reads rows by position.
        config: the global batch.
        positions: the positions of each step.
        share: this rank's micro-batches.
        device: the training device.
        steps: of the whole run.
        ahead: batches to read ahead.
        limit: time limit of the generation; when it ends, `read` stops waiting.
        one_shape: whether all micro-batches of a step have the same length.
        noise: draws the noise on embeddings; None: there is none.
        by_source: whether micro-batches name the source of each row.
    """

    def __init__(self, loader: Loader, config: BatchConfig, positions: Positions, share: MicroBatchShare, *,
                 device: torch.device, steps: int, ahead: int, limit: TimeLimit | None = None,
                 one_shape: bool = False, noise: Noise | None = None, by_source: bool = False) -> None:
        self._one_shape, self._noise, self._by_source = one_shape, noise, by_source
        self._loader, self._config, self._positions = loader, config, positions
        self._share, self._steps, self._ahead = share, steps, ahead
        self._copies = DeviceCopies(device)
        self._pending: dict[int, Future[tuple[RankBatch, Any]]] = {}
        self._thread, self._limit = DaemonThread("batches"), limit or TimeLimit()

    def read(self, step: int) -> RankBatch:
        """Return the batch of `step`, waiting for it if necessary, and start to read the next ones."""
        reach = self._loader.reach
        for next_step in range(step, min(step + self._ahead, self._steps) + 1):
            if next_step > step and reach is not None and self._positions.end(next_step) > reach:
                break  # the shard set has not grown that far
            if next_step not in self._pending:
                self._pending[next_step] = self._thread.submit(self._load, next_step)
        batch, copied = result(self._pending.pop(step), self._limit)
        return replace(batch, micro_batches=self._copies.take(batch.micro_batches, copied))

    def read_for(self, step: int, share: MicroBatchShare) -> list[MicroBatch]:
        """Read the micro-batches of another data rank, or this rank's once more, from the shard set; wait for them.

        Args:
            step: whose batch it is.
            share: the micro-batches of that rank.
        """
        batch, copied = result(self._thread.submit(self._load, step, share), self._limit)
        return self._copies.take(batch.micro_batches, copied)

    def start_over(self, positions: Positions) -> None:
        """Drop what was read ahead, and take other positions from now on."""
        self._positions = positions
        self._drop()

    def _drop(self) -> None:
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()

    def take_share(self, share: MicroBatchShare) -> None:
        """Drop what was read ahead, and read other micro-batches from now on."""
        self._share = share
        self._drop()

    def settle(self) -> None:
        """Wait until all shards that were read are known to be intact.

        Raises:
            ShardError: one is damaged.
        """
        self._loader.settle()

    def close(self) -> None:
        """Stop reading ahead. A read in progress is not waited for, as it may hang in storage."""
        self._thread.stop(wait=False)
        self._loader.close()

    def _load(self, step: int, share: MicroBatchShare | None = None) -> tuple[RankBatch, Any]:
        with self._limit.applied():
            return self._read(step, share or self._share)

    def _read(self, step: int, share: MicroBatchShare) -> tuple[RankBatch, Any]:
        """Return a batch and the event behind its copies to the device."""
        positions, size = self._positions.of(step), self._config.micro_sequences
        per_virtual = len(positions) // self._config.virtual_ranks
        mine = sequence_indices(share, len(positions), size)
        chosen = mine
        if self._config.group_by_length:
            lengths = self._loader.lengths(positions)
            chosen = similar_lengths(lengths, size, self._config.virtual_ranks)[mine]
        elif self._config.equal_attention:
            chosen = equal_costs(self._loader.attention_pairs(positions), size, self._config.virtual_ranks)[mine]
        rows = self._loader.batch(positions[chosen])
        domains = self._loader.domains(positions[chosen]) if self._by_source else None
        lengths = longest(rows)
        micros = []
        for start in range(0, len(mine), size):
            part = slice(start, start + size)
            cut_rows = cut(rows, part, self._padded(lengths, part, rows.width))
            micro = micro_batch(cut_rows, slice(0, size), int(mine[start]) // per_virtual, torch.device("cpu"))
            if self._noise is not None:
                rows_of_parts = (chosen[part, None] * rows.parts + np.arange(rows.parts)).ravel()
                micro = replace(micro, noise=self._noise(micro.segment_ids.numpy(), rows_of_parts, step))
            if domains is not None:
                counts = (micro.targets >= 0).sum(dim=1)
                micro = replace(micro, sources=tuple(domains[part].tolist()), row_targets=tuple(counts.tolist()))
            micros.append(micro)
        on_device, copied = self._copies.start(micros)
        return RankBatch(on_device, list(rows.ids), chosen), copied

    def _padded(self, lengths: np.ndarray, part: slice, most: int) -> int:
        """Return the length of a micro-batch's rows; a pipeline needs one length for all micro-batches of a step."""
        among = lengths if self._one_shape else lengths[part]
        return padded_length(among, self._config.pad_to_multiple_of, most)


def sequence_indices(share: MicroBatchShare, sequences: int, micro_sequences: int) -> np.ndarray:
    """Return the indices of a data rank's sequences in the global batch, in the order in which it reads them.

    Args:
        share: the rank's micro-batches.
        sequences: of the global batch.
        micro_sequences: of a micro-batch.

    Returns:
        [sequences / ranks] int64.
    """
    micro_batches = np.array(share.of(sequences // micro_sequences), dtype=np.int64)
    return (micro_batches[:, None] * micro_sequences + np.arange(micro_sequences)).ravel()


def micro_batch(rows: Rows, part: slice, virtual_rank: int, device: torch.device) -> MicroBatch:
    """Return rows as tensors on a device, with their targets. Mismatched parts of pairs are a batch of their own.

    Args:
        rows: see `joint_batch`, also for the others.
        part: which of them.
        virtual_rank: that they belong to.
        device: the training device.
    """
    if rows.parts == rows.answers:
        return joint_batch(rows, part, virtual_rank, device)
    pairs = joint_batch(rows.only(slice(rows.answers)), part, virtual_rank, device)
    mismatched = joint_batch(rows.only(slice(rows.answers, None)), part, virtual_rank, device)
    return replace(pairs, num_tokens=pairs.num_tokens + mismatched.num_tokens, mismatched=mismatched)


def joint_batch(rows: Rows, part: slice, virtual_rank: int, device: torch.device) -> MicroBatch:
    """Return rows as tensors on a device, with their targets.

    The parts of a row become neighbouring rows: [chosen 0, rejected 0, chosen 1, ...]. Each then has one document from
    its first token on, for which causal attention needs no mask.

    Args:
        rows: rows of the shard set.
        part: which of them.
        virtual_rank: that they belong to.
        device: the training device.
    """
    def split(values: np.ndarray) -> np.ndarray:
        return values[part].reshape(-1, rows.width)

    segment_ids = split(rows.segment_ids)
    tokens = torch.from_numpy(split(rows.tokens).astype(np.int64))
    segments = torch.from_numpy(segment_ids.astype(np.int64))
    positions = torch.from_numpy(split(rows.positions).astype(np.int64))
    targets = next_tokens(tokens, segments)
    if rows.loss_mask is not None:  # a target counts when the token to predict is marked
        marked = torch.from_numpy(split(rows.loss_mask).astype(bool))
        targets[:, :-1] = torch.where(marked[:, 1:], targets[:, :-1], IGNORED)
    steps = None if rows.step_labels is None else split(rows.step_labels)
    reference = None if rows.reference is None else torch.from_numpy(rows.reference[part]).to(device)
    teacher = None
    if rows.teacher is not None:
        chosen = rows.teacher.cut(part)
        teacher = TopK(torch.from_numpy(chosen.tokens.astype(np.int64)).to(device),
                       torch.from_numpy(chosen.log_probabilities).to(device))
    return MicroBatch(
        tokens=tokens.to(device), positions=positions.to(device), segment_ids=segments.to(device),
        targets=targets.to(device), virtual_rank=virtual_rank, num_tokens=int(rows.lengths[part].sum()),
        num_targets=int((targets >= 0).sum()), documents=Documents.of(segment_ids).to(device), parts=rows.parts,
        reference=reference, teacher=teacher,
        margins=None if rows.margins is None else torch.from_numpy(rows.margins[part]).to(device),
        desirable=None if rows.desirable is None else torch.from_numpy(rows.desirable[part]).to(device),
        rollouts=_rollout_columns(rows, part, device), num_steps=int((steps >= 0).sum()) if steps is not None else 0,
        step_labels=None if steps is None else torch.from_numpy(steps).to(device))


def _rollout_columns(rows: Rows, part: slice, device: torch.device) -> RolloutColumns | None:
    """Return the columns of rows of rollouts, None for other rows; see `micro_batch`."""
    if rows.sampled is None or rows.advantages is None:
        return None

    def of_targets(values: np.ndarray) -> torch.Tensor:
        """Return the values of tokens at the positions that predict them."""
        moved = np.zeros_like(values[part])
        moved[:, :-1] = values[part][:, 1:]
        return torch.from_numpy(moved).to(device)

    def if_read(values: np.ndarray | None) -> torch.Tensor | None:
        return None if values is None else of_targets(values)

    shared = rows.advantages.ndim == 1
    advantages = torch.from_numpy(rows.advantages[part].copy()).to(device) if shared else of_targets(rows.advantages)
    return RolloutColumns(of_targets(rows.sampled), advantages, if_read(rows.referred), if_read(rows.values),
                          if_read(rows.returns))


class BatchDigest:
    """Digest of the sequence ids that all data ranks loaded for a step, in order of position.

    Ranks send each id as one int64, shard index << 32 | row, and rank 0 restores the text. The shard index counts
    through all domains.

    Args:
        source: the training data.
        collectives: over all ranks.
        mesh: this rank's place.
        share: this rank's micro-batches.
        micro_sequences: sequences of a micro-batch.
    """

    def __init__(self, source: Source, collectives: Collectives, mesh: Mesh, share: MicroBatchShare,
                 micro_sequences: int) -> None:
        # only the first of the ranks that read the same rows sends them
        self._sends, self._group = mesh.leads, mesh.group(*DATA)
        self._share, self._micro_sequences = share, micro_sequences
        self._source, self._collectives = source, collectives
        self._names: list[str] = []
        self._index: dict[str, int] = {}

    def of(self, ids: Sequence[str], indices: np.ndarray | None = None) -> str | None:
        """Return the digest on rank 0, None elsewhere. All ranks call it with what they loaded.

        Args:
            ids: of their sequences.
            indices: of these in the global batch, if they are not in its order.
        """
        return self.start(ids, indices)()

    def start(self, ids: Sequence[str], indices: np.ndarray | None = None) -> Later[str | None]:
        """Gather the ids without waiting for them, and return a function that returns the digest.

        Args:
            ids: see `of`.
            indices: see `of`.
        """
        self._number()
        packed = torch.tensor([self._pack(sequence) for sequence in ids], dtype=torch.int64)
        if not self._sends:
            return lambda: None
        columns = packed[None] if indices is None else torch.stack((packed, torch.from_numpy(indices)))
        share = self._share
        counts = [len(ids)] * share.size
        if share.virtual_ranks:
            counts = [len(ids) // share.virtual_ranks[share.rank] * count for count in share.virtual_ranks]
            columns = torch.nn.functional.pad(columns, (0, max(counts) - len(ids)))
        gathered = self._collectives.gather_later(columns.flatten(), self._group)
        return lambda: self._digest(gathered(), share, counts)

    def take_share(self, share: MicroBatchShare) -> None:
        """Expect other micro-batches of this rank from the next step on."""
        self._share = share

    def _digest(self, gathered: torch.Tensor | None, share: MicroBatchShare, counts: Sequence[int]) -> str | None:
        """Return the digest of what all ranks sent: ids, and if the batch is grouped by length their indices.

        Args:
            gathered: a row of each rank's ids, or two rows, as long as the longest.
            share: the micro-batches of this rank at that step.
            counts: number of each rank's ids.
        """
        if gathered is None:
            return None
        columns = gathered.numpy().reshape(share.size, -1, max(counts))
        ids = np.concatenate([rows[0, :count] for rows, count in zip(columns, counts)])
        if columns.shape[1] == 2:
            read = np.concatenate([rows[1, :count] for rows, count in zip(columns, counts)])
        else:
            read = np.concatenate([sequence_indices(replace(share, rank=rank), len(ids), self._micro_sequences)
                                   for rank in range(share.size)])
        in_order = ids[np.argsort(read)].tolist()
        return sequence_digest([f"{self._names[code >> 32]}:{code & 0xFFFFFFFF}" for code in in_order])

    def _number(self) -> None:
        """Number the shards; those that a growing set has added come last."""
        domains = self._source.domains
        if self._names and len(domains) > 1:
            return  # only a single set grows
        for domain in domains:
            for shard in domain.manifest.shards[len(self._names) if len(domains) == 1 else 0:]:
                self._index[domain.prefix + shard.name] = len(self._names)
                self._names.append(domain.prefix + shard.name)

    def _pack(self, sequence: str) -> int:
        name, _, row = sequence.rpartition(":")
        return self._index[name] << 32 | int(row)
