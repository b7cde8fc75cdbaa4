"""Audit a run's rollouts: every prompt was admitted or dropped by name, once, and every group is whole.

What a step should have is computed from the prompts, the settings and the ledger; what it had is read from its shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidewheel import storage
from tidewheel.errors import StorageError
from tidewheel.post import ledger
from tidewheel.post.credit import Judged, credits
from tidewheel.post.episodes import replies
from tidewheel.post.ledger import StepEntry
from tidewheel.post.passes import untrained
from tidewheel.post.prompts import Prompts, prompts_of
from tidewheel.shards import growing
from tidewheel.shards.manifest import Manifest
from tidewheel.shards.rollouts import NO_VERSION, RolloutShard, read_shard
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.config import TrainConfig
from tidewheel.train.policy.config import RolloutsConfig
from tidewheel.train.run import with_absolute_uris

SHOWN = 20
"""Mismatches listed one by one; the rest are counted."""


@dataclass(frozen=True)
class RolloutAudit:
    """Result of an audit; `ok` if nothing was lost, doubled or mixed up."""

    steps: int
    """Steps with rollouts."""
    admitted: int
    """Groups that steps train on."""
    dropped: Counter[str]
    """Groups dropped, by reason."""
    epochs: float
    """Passes over the prompts."""
    open: int = 0
    """Groups that generators have, or that wait for a step."""
    most_lag: int = 0
    """Largest number of versions that a group's policy was behind the one that the first step of its wave trains."""
    passes: int = 1
    """Times that a group is trained on."""
    stored: int = 0
    """Groups whose rollouts have the hash in the ledger, of an engine that cannot repeat them."""
    again: int = 0
    """Of these, the groups that were begun before and lost, and are other rollouts."""
    repeats: bool = True
    """Whether the engine can repeat rollouts: see `Engine.REPEATS`."""
    mismatches: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether there is no mismatch."""
        return not self.mismatches

    def summary(self) -> str:
        """Return a summary of a few lines."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common()) or "none"
        head = (f"rollouts of {self.steps} steps: {self.admitted} groups admitted ({self.epochs:.2f} epochs of the "
                f"prompts), dropped: {reasons}")
        if self.most_lag:
            head += f"; the policy that sampled was at most {self.most_lag} version(s) behind"
        if self.open:
            head += f"; {self.open} groups are being sampled, or wait for a step"
        if self.passes > 1:
            head += f"; a wave is trained on in {self.passes} passes, which have each of its groups once"
        if self.ok:
            return (f"{head}\nevery prompt was admitted or dropped by name once, and every group is whole\n"
                    f"{self._contract()}")
        listed = [f"- {line}" for line in self.mismatches[:SHOWN]]
        more = len(self.mismatches) - SHOWN
        return "\n".join([head, f"{len(self.mismatches)} mismatches:", *listed, *([f"- and {more} more"] * (more > 0))])


    def _contract(self) -> str:
        """Return what holds for lost rollouts."""
        if self.repeats:
            return "a rollout follows from its key and the weights: a lost one is made again with the same bits"
        return (f"the engine cannot repeat rollouts, so they were stored: all {self.stored} groups have the hash in "
                f"the ledger; {self.again} were lost before they were stored, and sampled anew")


def audit_rollouts(run_uri: str) -> RolloutAudit | None:
    """Audit the rollouts of a run; None if it makes none.

    Raises:
        StorageError: the run does not exist.
        InputError: the prompts are gone.
        ShardError: a file of the rollouts is missing or damaged.
    """
    run = storage.store(run_uri)
    if not run.exists("run.json"):
        raise StorageError("no run.json", where=run_uri, fix="give the folder of a run, such as runs/<id>")
    values: dict[str, Any] = run.read_json("run.json")["config"]
    if not values.get("rollouts"):
        return None
    config = with_absolute_uris(TrainConfig.model_validate({**values, "data": {}}))
    rollouts = config.rollouts
    assert rollouts is not None
    folder = storage.store(config.data.uri)  # of another run, for a replay
    manifest = growing.read_set(folder)
    encoder = of_manifest(folder, manifest.tokenizer)
    prompts = prompts_of(config, encoder)
    mismatches = [] if prompts.hash == manifest.recipe_hash else ["the prompts have changed since the run began"]
    first, admitted, dropped = 0, 0, Counter[str]()
    judges: dict[tuple[str, str], int] = {}  # keys of reward and environment, and the first step that has them
    engines: dict[str, int] = {}  # keys of engines, and the first step that has them
    before: tuple[int, ...] = ()
    most_lag = stored = again = 0
    for wave, info in enumerate(manifest.shards, start=1):
        step = rollouts.first_step(wave)
        entry = ledger.read(folder, step, info.name)
        mismatches += [f"step {step}: {line}" for line in _entry(entry, first, before, info.name, rollouts)]
        before, most_lag = entry.open, max(most_lag, *entry.lags)
        shard = read_shard(folder, info, manifest)
        mismatches += [f"step {step}: {line}" for line in _groups(entry, shard, prompts, rollouts, manifest)]
        mismatches += [f"step {step}: {line}" for line in replies(entry, shard, prompts, rollouts, encoder)]
        if not rollouts.engine.REPEATS:
            mismatches += [f"step {step}: {line}" for line in _hashes(entry, shard, rollouts)]
            stored, again = stored + len(entry.rollouts), again + len(entry.again)
        engines.setdefault(entry.engine or rollouts.engine.key(), step)
        judges.setdefault((entry.reward, entry.environment), step)
        first, admitted = entry.next, admitted + len(entry.admitted)
        dropped += entry.reasons()
    mismatches += [f"step {step}: another reward or environment has judged than before" for step in
                   sorted(judges.values())[1:]]
    mismatches += untrained(run, rollouts, config.wave_groups)
    mismatches += [f"step {step}: another engine has sampled than before" for step in sorted(engines.values())[1:]]
    if before and run.exists("result.json"):
        mismatches.append(f"the run is over, but the groups at positions {list(before)} are in no step")
    return RolloutAudit(len(manifest.shards) * rollouts.wave_steps, admitted, dropped, first / len(prompts.prompts),
                        len(before), most_lag, rollouts.epochs, stored, again, rollouts.engine.REPEATS,
                        tuple(mismatches))


def _hashes(entry: StepEntry, shard: RolloutShard, rollouts: RolloutsConfig) -> Iterator[str]:
    """Yield which rollouts of a step are others than those that were stored when their engine had made them."""
    size = rollouts.group
    if len(entry.rollouts) != len(entry.admitted):
        yield f"the ledger has the hashes of {len(entry.rollouts)} groups, {len(entry.admitted)} were admitted"
        return
    if not set(entry.again) <= set(entry.admitted):
        yield "a group that was sampled anew was not admitted"
    if shard.batch.num_rows != size * len(entry.admitted):
        return  # `_groups` says so
    from tidewheel.post.stored import hashes_of  # imports torch, which the audit of other runs does without

    for position, stated, found in zip(entry.admitted, entry.rollouts, hashes_of(shard, entry.versions, size)):
        if stated != found:
            yield f"the rollouts of the group at position {position} have another hash than the ledger says"


def _entry(entry: StepEntry, first: int, before: tuple[int, ...], shard: str, rollouts: RolloutsConfig
           ) -> Iterator[str]:
    """Yield what is wrong with a step's entry in the ledger.

    Args:
        entry: of the step.
        first: position that no earlier step has come to.
        before: positions that were open after the step before.
        shard: name of the wave's shard.
        rollouts: the run's settings.
    """
    if entry.first != first:
        yield f"it begins at position {entry.first} of the prompts, the step before ended before {first}"
    taken = sorted([*entry.admitted, *(group.position for group in entry.dropped), *entry.open])
    if taken != sorted([*before, *range(entry.first, entry.next)]):
        yield "a position of the prompts is neither admitted nor dropped, or both"
    if entry.shard != shard:
        yield f"the ledger belongs to the shard {entry.shard}, but the wave has {shard}"
    if (entry.epochs, entry.minibatches) != (rollouts.epochs, rollouts.minibatches):
        yield f"it has {entry.epochs} passes of {entry.minibatches} steps, the run's settings say otherwise"
    oldest = rollouts.version_for(entry.step)
    newest = oldest if rollouts.schedule == "in_order" else entry.step - 1
    if min(entry.versions) < oldest or max(entry.versions) > newest:
        yield (f"it was sampled by the policies of the steps {sorted(set(entry.versions))}, allowed are {oldest} to "
               f"{newest}")


def _groups(entry: StepEntry, shard: RolloutShard, prompts: Prompts, rollouts: RolloutsConfig,
            manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with the groups of a step."""
    size = rollouts.group
    names, samples = shard.batch.column("prompt_id").to_pylist(), shard.batch.column("sample").to_pylist()
    if len(names) != size * len(entry.admitted):
        yield f"{len(names)} rollouts, but {len(entry.admitted)} groups of {size} were admitted"
        return
    for index, position in enumerate(entry.admitted):
        prompt, rows = prompts.at(position), range(index * size, (index + 1) * size)
        if any(names[row] != prompt.id for row in rows) or [samples[row] for row in rows] != list(range(size)):
            yield f"the group of the prompt {prompt.id!r} is not whole"
        for row in rows:
            begin = shard.tokens[1][row]
            if shard.tokens[0][begin:begin + len(prompt.tokens)].tolist() != list(prompt.tokens):
                yield f"a rollout of {prompt.id!r} begins with another prompt"
    versions = np.repeat(np.repeat(entry.versions, size), np.diff(shard.versions[1]))
    if np.any(shard.versions[0] != np.where(shard.learnt[0] == 1, versions, NO_VERSION)):
        yield "a token was sampled by another version of the policy than the ledger says"
    yield from _credits(shard, rollouts)


def _credits(shard: RolloutShard, rollouts: RolloutsConfig) -> Iterator[str]:
    """Yield whether advantages or returns are others than those that follow from the rewards of a step."""
    rows = range(len(shard.rewards))

    def of_sampled(name: str, row: int) -> list[float]:
        """Return the values of a column for the tokens that the policy sampled; [] if the row has none."""
        found = shard.of_row(name, row)
        return found[shard.of_row("learnt", row) == 1].tolist() if len(found) else []

    if rollouts.kl_weight and any(not of_sampled("reference", row) for row in rows):
        yield "a rollout has no log-probabilities under the reference model"
        return
    answers = [Judged(reward, of_sampled("log_probabilities", row), of_sampled("reference", row),
                      of_sampled("values", row)) for row, reward in enumerate(shard.rewards.tolist())]
    groups = [answers[begin:begin + rollouts.group] for begin in range(0, len(answers), rollouts.group)]
    planned = [credit for group in credits(groups, rollouts) for credit in group]
    if not np.allclose([credit.advantage for credit in planned], shard.advantages, rtol=1e-4, atol=1e-5):
        yield "the advantages do not follow from the rewards"
    for name in ("advantages", "returns"):
        wanted = [value for credit in planned for value in getattr(credit, name)]
        stored = [value for row in rows for value in of_sampled(name, row)]
        if len(wanted) != len(stored) or not np.allclose(wanted, stored, rtol=1e-4, atol=1e-5):
            yield f"the {name} of the tokens do not follow from the rewards"
