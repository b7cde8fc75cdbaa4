"""Rollouts of an engine that cannot make them again with the same bits: stored before a step may have them.

A group that is done becomes an Arrow file in the run's folder, named by the hash of its content, and a driver that
takes over uses it. Before groups are given out, a file says which: so the ledger can tell a group that was begun
before, was lost, and is another rollout now. It has the hash of each admitted group, which the step's shard must have.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import blake3
import numpy as np
import pyarrow as pa
import pyarrow.ipc

from tidewheel.errors import StorageAwayError
from tidewheel.inference.group import Answer
from tidewheel.post.fetching import Fetched
from tidewheel.post.groups import Group, Job
from tidewheel.post.kept import Kept
from tidewheel.post.ledger import Policy
from tidewheel.shards.rollouts import RolloutShard
from tidewheel.storage import Store, content_hash
from tidewheel.train.config import TrainConfig

logger = logging.getLogger(__name__)
STORED, BEGUN = "stored", "begun"
_FLOATS = pa.list_(pa.float64())
SCHEMA = pa.schema([("tokens", pa.list_(pa.int64())), ("log_probabilities", _FLOATS), ("written", pa.list_(pa.int64())),
                    ("begin", pa.int64()), ("stopped", pa.bool_()), ("reward", pa.float64()), ("referred", _FLOATS),
                    ("values", _FLOATS)])
"""Columns of a stored group, a row for each answer. The schema's metadata have the rest, see `_head`."""


class Stored(Kept):
    """The groups of a run that no step has, each stored at once; see `Kept` for the arguments."""

    FOLDER = STORED
    ENDING = ".arrow"

    def __init__(self, folder: Store, config: TrainConfig) -> None:
        super().__init__(folder, config)
        self._begun: dict[str, set[int]] = {}  # positions of the groups of each file that no step has

    def load(self) -> dict[int, tuple[Group, Policy]]:
        """See `Kept`."""
        for entry in self._folder.list(BEGUN):
            data = self._folder.read(entry.key)
            if begun_key(data) != entry.key:
                logger.warning("%s is damaged: the ledger will not say that its groups were begun before",
                               self._folder.at(entry.key))
                continue
            self._begun[entry.key] = set(json.loads(data)["positions"])
        return super().load()

    def begin(self, jobs: Sequence[Job]) -> list[Job]:
        """See `Kept`. Storage then says that the jobs are given out.

        Raises:
            StorageAwayError: storage is unavailable. Nothing has changed.
        """
        if not jobs:
            return []
        before = set().union(*self._begun.values())
        positions = [job.position for job in jobs]
        data = json.dumps({"positions": positions, "version": jobs[0].version.number}).encode()
        key = begun_key(data)
        self._folder.write(key, data)
        self._begun[key] = set(positions)
        return [replace(job, again=job.again or job.position in before) for job in jobs]

    def write_due(self) -> None:
        """Write the groups that are not stored yet."""
        try:
            self.flush()
        except StorageAwayError as error:
            logger.warning("groups that are done are not stored yet: %s", error)

    def flush(self) -> None:
        """See `Kept`."""
        for position, (group, policy) in list(self._new.items()):
            data = _file(group, policy, self._recipe)
            key = self.key_of(data)
            self._folder.write(key, data)
            self._files[key] = {position}
            del self._new[position]

    def keep_only(self, positions: set[int], given: set[int] | None = None) -> None:
        """See `Kept`."""
        super().keep_only(positions)
        still = positions | (given or set())
        for key in [key for key, inside in self._begun.items() if not inside & still]:
            try:
                self._folder.delete(key)
            except StorageAwayError as error:  # a later step removes it
                logger.warning("what is said of groups that steps have is still kept: %s", error)
                return
            del self._begun[key]

    def _parse(self, data: bytes) -> list[tuple[Group, Policy]]:
        try:
            with pa.ipc.open_file(pa.BufferReader(data)) as reader:
                table = reader.read_all()
        except pa.ArrowInvalid as error:
            raise ValueError(str(error)) from error
        if not table.schema.equals(SCHEMA):
            raise ValueError("it has other columns")
        head = json.loads(table.schema.metadata[b"group"])
        if head.pop("recipe") != self._recipe:
            return []
        rows = table.to_pylist()
        policy, fetched = Policy(**head.pop("policy")), Fetched(**head.pop("fetched"))
        answers = tuple(Answer(row["tokens"], row["log_probabilities"], row["stopped"], frozenset(row["written"]),
                               row["begin"]) for row in rows)
        group = Group(**head, answers=answers, rewards=tuple(row["reward"] for row in rows), fetched=fetched,
                      referred=tuple(row["referred"] for row in rows if row["referred"]),
                      values=tuple(row["values"] for row in rows if row["values"]))
        return [(group, policy)]


def begun_key(data: bytes) -> str:
    """Return the key of a file that says which groups are given out."""
    return f"{BEGUN}/{content_hash(data).removeprefix('blake3-')[:32]}.json"


def _file(group: Group, policy: Policy, recipe: list[str]) -> bytes:
    """Return the content of a group's file."""
    head = asdict(replace(group, answers=(), rewards=(), referred=(), values=()))
    for name in ("answers", "rewards", "referred", "values"):
        del head[name]
    nothing: tuple[list[float], ...] = ([],) * len(group.answers)
    rows = [{"tokens": answer.tokens, "log_probabilities": answer.log_probabilities, "written": sorted(answer.written),
             "begin": answer.begin, "stopped": answer.stopped, "reward": reward, "referred": referred, "values": values}
            for answer, reward, referred, values in zip(group.answers, group.rewards, group.referred or nothing,
                                                        group.values or nothing)]
    about = json.dumps({**head, "policy": asdict(policy), "recipe": recipe}, sort_keys=True)
    table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({"group": about}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def group_hash(prompt_id: str, version: int, answers: Sequence[tuple[Any, Any, Any]]) -> str:
    """Return the hash of a group's rollouts.

    Args:
        prompt_id: id of the prompt.
        version: of the policy that sampled it.
        answers: in the order of the samples: tokens, what was learnt (see `Answer.learnt`) and log-probabilities, each
            [n].
    """
    digest = blake3.blake3(json.dumps([prompt_id, version, [len(tokens) for tokens, _, _ in answers]]).encode())
    for tokens, learnt, values in answers:
        digest.update(np.asarray(tokens, dtype="<u4").tobytes())
        digest.update(np.asarray(learnt, dtype="u1").tobytes())
        digest.update(np.asarray(values, dtype="<f4").tobytes())
    return f"blake3-{digest.hexdigest()}"


def hash_of(group: Group) -> str:
    """Return the hash of a group's rollouts."""
    answers = [(answer.tokens, answer.learnt, answer.log_probabilities) for answer in group.answers]
    return group_hash(group.prompt_id, group.version, answers)


def hashes_of(shard: RolloutShard, versions: Sequence[int], size: int) -> Iterator[str]:
    """Yield the hash of each group's rollouts in a step's shard.

    Args:
        shard: of the step.
        versions: version of the policy for each group.
        size: answers of a group.
    """
    names = shard.batch.column("prompt_id").to_pylist()
    tokens, bounds = shard.tokens
    for index, version in enumerate(versions):
        answers = []
        for row in range(index * size, (index + 1) * size):
            answer = tokens[bounds[row] + int(shard.prompts[row]):bounds[row + 1]]
            answers.append((answer, shard.of_row("learnt", row), shard.of_row("log_probabilities", row)))
        yield group_hash(names[index * size], version, answers)
