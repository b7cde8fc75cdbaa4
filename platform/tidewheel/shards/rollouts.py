"""Read rollouts as arrays from memory-mapped files, and check them.

A row is a prompt and an answer that a policy sampled, padded at its end to the set's sequence_length. The loss mask
marks the tokens of the answer that the policy sampled; an environment may have written the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.format import OF_TOKENS, only_batch, rollout_schema, stored_batch
from tidewheel.shards.manifest import REBUILD, ROLLOUTS, Manifest, ShardInfo
from tidewheel.shards.opened import OpenedSet, Rows

NO_VERSION = -1
"""Version of tokens that no policy sampled."""
OF_ANSWER = ("learnt", "log_probabilities", "versions")
"""Columns with a value for each token of the answer."""
OPTIONAL = ("reference", *OF_TOKENS)
"""Columns with a value for each token of the answer, or none."""


@dataclass(frozen=True)
class RolloutShard:
    """The columns of one memory-mapped shard of n rollouts. Nothing is copied."""

    prompts: np.ndarray
    """[n] int32: tokens of each prompt."""
    tokens: tuple[np.ndarray, np.ndarray]
    """All tokens, and int32 [n + 1]: row r has the tokens from bound r to bound r + 1."""
    learnt: tuple[np.ndarray, np.ndarray]
    log_probabilities: tuple[np.ndarray, np.ndarray]
    versions: tuple[np.ndarray, np.ndarray]
    optional: dict[str, tuple[np.ndarray, np.ndarray]]
    """The columns in `OPTIONAL`; of rows without them, nothing."""
    advantages: np.ndarray
    """[n] fp32."""
    rewards: np.ndarray
    """[n] fp32."""
    batch: pa.RecordBatch
    """All columns, as in `shards.format.rollout_schema`."""

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each row, int32 [n]."""
        return np.diff(self.tokens[1])

    def of_row(self, name: str, row: int) -> np.ndarray:
        """Return the values of one of `OF_ANSWER` or `OPTIONAL` for the tokens of a row's answer, maybe none."""
        return _of_row(self.optional[name] if name in self.optional else getattr(self, name), row)

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> RolloutShard:
        """Return the columns of a batch."""
        def flat(name: str) -> tuple[np.ndarray, np.ndarray]:
            column = batch.column(name)
            return column.values.to_numpy(), column.offsets.to_numpy()

        return cls(batch.column("prompt_length").to_numpy(), flat("tokens"), flat("learnt"),
                   flat("log_probabilities"), flat("versions"), {name: flat(name) for name in OPTIONAL},
                   batch.column("advantage").to_numpy(), batch.column("reward").to_numpy(), batch)


def problem_of(shard: RolloutShard, manifest: Manifest) -> str:
    """Return what is wrong with a shard's rows, "" if nothing is.

    Args:
        shard: the shard.
        manifest: of its set.
    """
    lengths = shard.lengths
    if lengths.min() < 1 or lengths.max() > manifest.sequence_length:
        return f"a row has {lengths.min()} or {lengths.max()} tokens, allowed are 2 to {manifest.sequence_length}"
    if shard.prompts.min() < 1 or np.any(shard.prompts >= lengths):
        return "a prompt has no token, or is not shorter than its row"
    answers = lengths - shard.prompts
    for name in OF_ANSWER:
        if np.any(np.diff(getattr(shard, name)[1]) != answers):
            return f"{name} has not one value for each token of an answer"
    for name, (_, bounds) in shard.optional.items():
        known = np.diff(bounds)
        if np.any((known != 0) & (known != answers)):
            return f"{name} has not one value for each token of an answer"
    if int(shard.tokens[0].max()) >= manifest.vocabulary_size:
        return f"a token is outside the vocabulary of {manifest.vocabulary_size}"
    if shard.learnt[0].max() > 1 or np.any(np.add.reduceat(shard.learnt[0], shard.learnt[1][:-1]) == 0):
        return "learnt has values other than 0 and 1, or marks no token of an answer"
    floats = [shard.log_probabilities[0], shard.advantages, *(values for values, _ in shard.optional.values())]
    if not all(np.isfinite(values).all() for values in floats) or shard.log_probabilities[0].max() > 0:
        return "a log-probability, advantage or value is not finite, or a log-probability is above 0"
    return ""


class RolloutSet(OpenedSet[RolloutShard]):
    """A set of rollouts opened for reading. Safe to use from several threads."""

    KIND = ROLLOUTS

    def _opened(self, path: Path, index: int) -> RolloutShard:
        info, where = self.manifest.shards[index], self.store.at(self.manifest.shards[index].name)
        batch = only_batch(path, where)
        if batch is None or not batch.schema.equals(rollout_schema(self.manifest.token_dtype)) \
                or batch.num_rows != info.rows or any(column.null_count for column in batch.columns):
            raise ShardError(f"the shard's columns or rows are not those of its manifest, which has {info.rows} rows",
                             where=where, fix=REBUILD)
        shard = RolloutShard.of(batch)
        if problem := problem_of(shard, self.manifest):
            raise self._damaged(index, problem)
        return shard

    def _lengths(self, shard: RolloutShard) -> np.ndarray:
        return shard.lengths

    def _gather(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        manifest, shape = self.manifest, (len(shards), self.manifest.sequence_length)
        tokens = np.full(shape, manifest.tokenizer["pad"], dtype=manifest.token_dtype)
        segments = np.full(shape, -1, dtype=np.int32)
        positions = np.zeros(shape, dtype=np.int32)
        mask = np.zeros(shape, dtype=np.uint8)
        sampled = np.zeros(shape, dtype=np.float32)
        optional = {name: np.zeros(shape, dtype=np.float32) for name in OPTIONAL}
        lengths = np.zeros(len(shards), dtype=np.int32)
        advantages = np.zeros(len(shards), dtype=np.float32)
        missing = set() if len(shards) else set(OPTIONAL)
        for slot, (index, row) in enumerate(zip(shards.tolist(), rows.tolist())):
            shard = self.shard(index)
            row_tokens = _of_row(shard.tokens, row)
            size, prompt = len(row_tokens), int(shard.prompts[row])
            tokens[slot, :size] = row_tokens
            segments[slot, :size] = 0
            positions[slot, :size] = np.arange(size)
            mask[slot, prompt:size] = _of_row(shard.learnt, row)
            sampled[slot, prompt:size] = _of_row(shard.log_probabilities, row)
            for name, column in shard.optional.items():
                of_answer = _of_row(column, row)
                if len(of_answer):
                    optional[name][slot, prompt:size] = of_answer
                else:
                    missing.add(name)
            lengths[slot], advantages[slot] = size, shard.advantages[row]
        ids = [f"{manifest.shards[shard].name}:{row}" for shard, row in zip(shards.tolist(), rows.tolist())]
        known = {name: values for name, values in optional.items() if name not in missing}
        return Rows(tokens, lengths, segments, positions, ids, mask, sampled=sampled, referred=known.get("reference"),
                    advantages=known.get("advantages", advantages), values=known.get("values"),
                    returns=known.get("returns"))


def read_shard(set_store: storage.Store, info: ShardInfo, manifest: Manifest) -> RolloutShard:
    """Return one shard, having checked its hash, columns and rows.

    Args:
        set_store: the set's folder.
        info: the shard.
        manifest: the set's manifest.

    Raises:
        ShardError: the shard is damaged; names the shard.
    """
    where = set_store.at(info.name)
    batch = stored_batch(set_store, info)
    if batch is None or not batch.schema.equals(rollout_schema(manifest.token_dtype)) or batch.num_rows != info.rows:
        raise ShardError("the shard's columns or rows are not those of its manifest", where=where, fix=REBUILD)
    shard = RolloutShard.of(batch)
    if problem := problem_of(shard, manifest):
        raise ShardError(problem, where=where, fix=REBUILD)
    return shard


def check_shard(set_store: storage.Store, info: ShardInfo, manifest: Manifest) -> list[str]:
    """Check a shard to the last token and return a line for each problem.

    Args:
        set_store: the set's folder.
        info: the shard.
        manifest: the set's manifest.
    """
    try:
        shard = read_shard(set_store, info, manifest)
    except ShardError as error:
        return [error.what]
    tokens = int(shard.lengths.sum(dtype=np.int64))
    return [] if tokens == info.tokens else [f"{tokens} tokens, the manifest says {info.tokens}"]


def row_of(set_store: storage.Store, manifest: Manifest, row: int, shown: int | None = None) -> dict[str, Any]:
    """Return JSON values of a row.

    Args:
        set_store: the set's folder.
        manifest: its manifest.
        row: index of the row in the whole set.
        shown: number of tokens to return; None: all.

    Raises:
        ShardError: there is no such row, or its shard is damaged.
    """
    info, inside = manifest.place(row, set_store.uri)
    values = read_shard(set_store, info, manifest).batch.slice(inside, 1).to_pylist()[0]
    return {"row": row, "id": f"{info.name}:{inside}", "prompt_id": values["prompt_id"], "sample": values["sample"],
            "prompt_length": values["prompt_length"], "length": len(values["tokens"]), "reward": values["reward"],
            "advantage": values["advantage"], "versions": sorted(set(values["versions"]) - {NO_VERSION}),
            "tokens": values["tokens"][:shown]}


def _of_row(column: tuple[np.ndarray, np.ndarray], row: int) -> np.ndarray:
    values, bounds = column
    return values[bounds[row]:bounds[row + 1]]
