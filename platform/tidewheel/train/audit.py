"""Audit a run: prove that it read each sequence once per epoch, in the planned order, despite kills and resizes.

The plan is recomputed from the manifests, the mixture and the seed alone. The record holds what the ranks loaded.

A run has one owner at a time (`commit_log`), and its records must show it: no group of workers recorded a step twice, a
step that was done again has the same loss, and the steps of a later driver have no gap that an older one fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidewheel import jsonlog
from tidewheel.commit_log import epoch_of
from tidewheel.errors import StorageError
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.source import Source
from tidewheel.storage import store
from tidewheel.train.positions import Positions
from tidewheel.train.record import positions, read_rollbacks, recorded_source

SHOWN = 20
"""Mismatches listed one by one; the rest are counted."""
SAME_LOSS = 0.01
"""Allowed relative difference of two losses of one step outside reproducible mode, where the order of sums depends on
the number of workers. The equivalence table finds at most 2e-4 in fp32; bf16 has 8 bits."""


@dataclass(frozen=True)
class AuditResult:
    """Result of an audit; `ok` if every step was read as planned."""

    run_uri: str
    steps: int
    """Last step recorded."""
    planned_steps: int
    """Steps that the run was configured for, or more if it was extended."""
    records: int
    """Lines of batches.jsonl, including steps done again."""
    redone: int
    """Records of steps that already had one."""
    sequences: int
    """Distinct positions read; steps done again count once."""
    passed_over: int
    """Positions that a guard passed over on purpose, up to the last step."""
    epochs: float
    """Passes over the shard set, or over all sets of a mixture together."""
    generations: int
    """Generations of workers that recorded steps."""
    world_sizes: tuple[int, ...]
    """Numbers of workers, in order of appearance."""
    domains: tuple[dict[str, Any], ...] = field(default=())
    """For a mixture, the share of each domain up to the last step, as in `Source.proportions`."""
    mismatches: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether there is no mismatch."""
        return not self.mismatches

    def summary(self) -> str:
        """Return a summary of a few lines."""
        sizes = " -> ".join(str(size) for size in self.world_sizes) or "none"
        head = (f"{self.steps} of {self.planned_steps} steps, {self.sequences} sequences ({self.epochs:.2f} epochs), "
                f"workers {sizes}, {self.redone} steps done again")
        head += "".join(f"\n  {part['domain']}: {part['sequences']} sequences, {part['share']:.2%}, "
                        f"{part['epochs']:.2f} epochs" for part in self.domains)
        but = f" but {self.passed_over} that guards passed over on purpose" if self.passed_over else ""
        if self.ok:
            return f"{head}\nevery global batch held the planned sequences in the planned order, each exactly once{but}"
        listed = [f"- {line}" for line in self.mismatches[:SHOWN]]
        more = len(self.mismatches) - SHOWN
        return "\n".join([head, f"{len(self.mismatches)} mismatches:", *listed, *([f"- and {more} more"] * (more > 0))])


def audit(run_uri: str) -> AuditResult:
    """Compare a run's batches.jsonl with the plan.

    Raises:
        StorageError: the run does not exist.
        ShardError: a shard set is missing, or is not the run's.
    """
    run_store = store(run_uri)
    if not run_store.exists("run.json"):
        raise StorageError("no run.json", where=run_uri, fix="give the folder of a run, such as runs/<id>")
    run = run_store.read_json("run.json")
    config = run["config"]
    source = recorded_source(run, store=run_store)
    records = jsonlog.read(run_store, "batches.jsonl")
    rollbacks = read_rollbacks(run_store)
    plan = positions(run, source, rollbacks)
    steps = {int(record["step"]) for record in records if not _undone(record, rollbacks)}
    last = max(steps, default=0)
    first = 1 + int(run.get("branch", {}).get("step", 0))  # the parent has the records of the steps before
    mismatches = [f"step {step} has no record" for step in range(first, last + 1) if step not in steps]
    mismatches += _differences(records, source, plan)
    mismatches += _repeats(source, [*range(1, first), *sorted(steps)] if steps else [], plan)
    mismatches += _two_writers(records)
    mismatches += _mixed_epochs(records)
    if not rollbacks:  # a rollback repeats steps with other data, on purpose
        mismatches += _two_losses(jsonlog.read(run_store, "metrics.jsonl"), run)
    rows = sum(domain.manifest.rows for domain in source.domains)
    end = plan.end(last)
    sizes = [int(record["world_size"]) for record in records]
    return AuditResult(
        run_uri=run_uri, steps=last, planned_steps=max(config["steps"], last), records=len(records),
        redone=len(records) - len(steps), sequences=len(plan.of_steps(sorted(steps))), epochs=end / rows,
        passed_over=len(plan.skipped(end)),
        generations=len({record["generation"] for record in records}),
        world_sizes=tuple(n for i, n in enumerate(sizes) if i == 0 or n != sizes[i - 1]), mismatches=tuple(mismatches),
        domains=tuple(source.proportions(end)) if source.mixture is not None else ())


def _two_writers(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the steps that one group of workers recorded more than once without a rollback."""
    seen: dict[tuple[int, int, int], dict[str, Any]] = {}
    for record in records:
        key = (int(record["step"]), int(record["generation"]), int(record.get("passed_over", 0)))
        if key in seen:
            yield (f"step {key[0]} was recorded twice by worker group {key[1]}: two drivers trained this run at once")
        seen[key] = record


def _mixed_epochs(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the steps of an older driver between those of a later one."""
    newest: dict[int, int] = {}
    last: dict[int, int] = {}
    for record in records:
        step, epoch = int(record["step"]), epoch_of(int(record["generation"]))
        newest[step] = max(newest.get(step, 0), epoch)
        last[epoch] = max(last.get(epoch, 0), step)
    reached = 0
    for step in sorted(newest):
        if newest[step] < reached and step <= last[reached]:
            yield f"step {step} is of epoch {newest[step]}, amid those of epoch {reached}: the epochs are mixed"
        reached = max(reached, newest[step])


def _two_losses(metrics: Sequence[dict[str, Any]], run: dict[str, Any]) -> Iterator[str]:
    """Yield the steps that were done more than once, with the same settings, and have different losses.

    A group of a DiLoCo run that was left out goes on from a newer outer state, so only steps from one state compare.
    """
    changed = {int(start["epoch"]) for start in run.get("starts", ()) if start.get("changed")}
    exact = bool(run["config"].get("reproducible"))
    first: dict[tuple[int, Any], dict[str, Any]] = {}
    for line in metrics:
        loss = line.get("loss")
        if loss is None or "generation" not in line:
            continue
        key = int(line["step"]), line.get("outer_base")
        before = first.setdefault(key, line)
        between = range(epoch_of(int(before["generation"])) + 1, epoch_of(int(line["generation"])) + 1)
        if any(epoch in changed for epoch in between):
            first[key] = line  # another configuration from here on
            continue
        allowed = 0.0 if exact else SAME_LOSS * max(abs(float(before["loss"])), 1e-3)
        if abs(float(loss) - float(before["loss"])) > allowed:
            yield (f"step {line['step']} has two losses: {before['loss']:.6g} in worker group {before['generation']} "
                   f"and {loss:.6g} in worker group {line['generation']}")


def _undone(record: dict[str, Any], rollbacks: Sequence[dict[str, int]]) -> bool:
    """Return whether the run later went back to before this record's step."""
    return any(rollback["back_to"] < record["step"] for rollback in rollbacks[record.get("passed_over", 0):])


def _differences(records: list[dict], source: Source, plan: Positions) -> Iterator[str]:
    """Yield the records that differ from the plan of their step, with the windows known at their time."""
    planned: dict[tuple[int, int], str] = {}
    plans: dict[int, Positions] = {}
    for record in records:
        step, known = int(record["step"]), int(record.get("passed_over", 0))
        positions_of_step = plans.setdefault(known, plan.known(known)).of(step)
        start = int(positions_of_step[0])
        size = len(positions_of_step)
        key = (known, step)
        group = f"step {step} (generation {record['generation']}, {record['world_size']} workers)"
        if (record["position"], record["count"]) != (start, size):
            yield (f"{group} read positions {record['position']} + {record['count']}, planned {start} + {size}")
            continue
        if key not in planned:
            planned[key] = sequence_digest(source.ids_at(positions_of_step))
        if record["digest"] != planned[key]:
            yield f"{group} has digest {record['digest']}, planned {planned[key]}: other sequences, or another order"


def _repeats(source: Source, steps: list[int], plan: Positions) -> Iterator[str]:
    """Yield the sequences that the steps read twice in an epoch of their domain, or not at all in a complete epoch.

    Sequences that a guard passed over, or that other groups read, count as read.
    """
    if not steps:
        return
    end = plan.end(steps[-1])
    owners, visits = source.visits(np.concatenate([plan.of_steps(steps), plan.skipped(end),
                                                   plan.elsewhere(steps[-1])]))
    done = source.counts(end)
    for index, domain in enumerate(source.domains):
        counts = [shard.rows for shard in domain.manifest.shards]
        starts, total, order = np.cumsum([0, *counts]), domain.manifest.rows, source.orders[index]
        own_visits = visits[owners == index]
        shards, rows = order.locate(own_visits)
        sequences, epochs = starts[shards] + rows, order.passes(own_visits)[1]
        for epoch in range(int(epochs.max(initial=-1)) + 1):
            times = np.bincount(sequences[epochs == epoch], minlength=total)
            missing = (times == 0) & (np.arange(total) < order.complete_rows(done[index], epoch))
            for sequence in np.flatnonzero((times > 1) | missing):
                shard = int(np.searchsorted(starts, sequence, side="right")) - 1
                name = domain.id(shard, int(sequence - starts[shard]))
                yield f"epoch {epoch}: sequence {name} was read {int(times[sequence])} times"
