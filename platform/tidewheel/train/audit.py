"""Did the run read what it was meant to, each sequence exactly once per epoch, through every kill and resize?

The plan is recomputed from the manifest and the seed alone; the record is what the ranks loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tidewheel import jsonlog
from tidewheel.errors import ShardError, StorageError
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.manifest import Manifest, read_manifest
from tidewheel.shards.order import Order, batch_ids
from tidewheel.storage import store

SHOWN = 20
"""Mismatches listed one by one; the rest are counted."""


@dataclass(frozen=True)
class AuditResult:
    """What the audit found; `ok` when every step was read as planned."""

    run_uri: str
    steps: int
    """Last step recorded."""
    planned_steps: int
    """Steps the run was configured for when it started, or more when it was prolonged."""
    records: int
    """Lines of batches.jsonl, steps done again included."""
    redone: int
    """Records of steps that already had one."""
    sequences: int
    """Distinct positions read, steps done again not counted twice."""
    epochs: float
    """Passes over the shard set."""
    generations: int
    """Starts of the trainers that recorded steps."""
    world_sizes: tuple[int, ...]
    """Numbers of workers, in order of appearance."""
    mismatches: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """No mismatch."""
        return not self.mismatches

    def summary(self) -> str:
        """A few lines for people."""
        sizes = " -> ".join(str(size) for size in self.world_sizes) or "none"
        head = (f"{self.steps} of {self.planned_steps} steps, {self.sequences} sequences ({self.epochs:.2f} epochs), "
                f"workers {sizes}, {self.redone} steps done again")
        if self.ok:
            return f"{head}\nevery global batch held the planned sequences in the planned order, each exactly once"
        listed = [f"- {line}" for line in self.mismatches[:SHOWN]]
        more = len(self.mismatches) - SHOWN
        return "\n".join([head, f"{len(self.mismatches)} mismatches:", *listed, *([f"- and {more} more"] * (more > 0))])


def audit(run_uri: str) -> AuditResult:
    """Compare a run's batches.jsonl with the plan.

    Raises:
        StorageError: no such run.
        ShardError: the shard set is gone, or is not the one the run was started with.
    """
    place = store(run_uri)
    if not place.exists("run.json"):
        raise StorageError("no run.json", where=run_uri, mend="give the folder of a run, such as runs/<id>")
    run = place.read_json("run.json")
    config, shards = run["config"], run["data"]["shards"]
    manifest = read_manifest(store(shards["uri"]))
    if manifest.hash != shards["hash"]:
        raise ShardError("the shard set has changed since the run started", where=shards["uri"],
                         mend="audit against the original shard set")
    order = Order([shard.rows for shard in manifest.shards], config["data"]["seed"])
    records = jsonlog.read(place, "batches.jsonl")
    size = config["batch"]["global_sequences"]
    steps = {int(record["step"]) for record in records}
    last = max(steps, default=0)
    mismatches = [f"step {step} has no record" for step in range(1, last + 1) if step not in steps]
    mismatches += _differences(records, order, manifest, size)
    mismatches += _repeats(order, manifest, sorted(steps), size)
    sizes = [int(record["world_size"]) for record in records]
    return AuditResult(
        run_uri=run_uri, steps=last, planned_steps=max(config["steps"], last), records=len(records),
        redone=len(records) - len(steps), sequences=len(steps) * size, epochs=last * size / manifest.rows,
        generations=len({record["generation"] for record in records}),
        world_sizes=tuple(n for i, n in enumerate(sizes) if i == 0 or n != sizes[i - 1]), mismatches=tuple(mismatches))


def _differences(records: list[dict], order: Order, manifest: Manifest, size: int) -> Iterator[str]:
    """Records that are not what the plan says for their step."""
    planned: dict[int, str] = {}
    for record in records:
        step = int(record["step"])
        start = (step - 1) * size
        who = f"step {step} (generation {record['generation']}, {record['world_size']} workers)"
        if (record["position"], record["count"]) != (start, size):
            yield (f"{who} read positions {record['position']} + {record['count']}, planned {start} + {size}")
            continue
        if step not in planned:
            planned[step] = sequence_digest(batch_ids(order, manifest, start, size))
        if record["digest"] != planned[step]:
            yield f"{who} has digest {record['digest']}, planned {planned[step]}: other sequences, or another order"


def _repeats(order: Order, manifest: Manifest, steps: list[int], size: int) -> Iterator[str]:
    """Sequences that the recorded steps read twice in an epoch, or not at all in a whole one."""
    if not steps:
        return
    starts = np.cumsum([0, *(shard.rows for shard in manifest.shards)])
    positions = (np.asarray(steps, dtype=np.int64)[:, None] - 1) * size + np.arange(size)
    positions = positions.ravel()
    shards, rows = order.locate(positions)
    sequences, epochs = starts[shards] + rows, positions // manifest.rows
    whole = steps[-1] * size // manifest.rows  # epochs before this one are over
    for epoch in range(int(epochs[-1]) + 1):
        times = np.bincount(sequences[epochs == epoch], minlength=manifest.rows)
        wrong = np.flatnonzero(times > 1) if epoch >= whole else np.flatnonzero(times != 1)
        for sequence in wrong:
            shard = int(np.searchsorted(starts, sequence, side="right")) - 1
            name = f"{manifest.shards[shard].name}:{sequence - starts[shard]}"
            yield f"epoch {epoch}: sequence {name} was read {int(times[sequence])} times"
