"""Collect the rollouts of each wave and write them as the next wave of the run's shard set.

A wave has the rollouts of a step; with `rollouts.epochs` or `minibatches` of several, and is then named by the first.
It takes prompts in the run's order until enough groups are admitted. A group that fails, or whose rewards are all equal
with `resample`, is dropped by name, and the next prompt takes its place. Which groups a wave has so follows from the
policy and the rewards alone; what was done when a process ended is done again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from tidewheel import storage
from tidewheel.errors import RolloutError
from tidewheel.post import ledger
from tidewheel.post.credit import Judged, credits
from tidewheel.post.groups import Group, Job
from tidewheel.post.kept import Kept
from tidewheel.post.ledger import EQUAL, Dropped, Policy, StepEntry
from tidewheel.post.policy import Version, wait_for
from tidewheel.post.pool import Pool
from tidewheel.post.prompts import Prompts
from tidewheel.post.stored import Stored, hash_of
from tidewheel.post.waiting import patiently
from tidewheel.shards import growing
from tidewheel.shards.format import rollout_schema, write_shard
from tidewheel.shards.growing import MOST_WAVES, Growing
from tidewheel.shards.manifest import GROWING, ROLLOUTS, Manifest
from tidewheel.shards.rollouts import NO_VERSION
from tidewheel.storage import Store
from tidewheel.train.config import TrainConfig
from tidewheel.train.policy.config import RolloutsConfig

logger = logging.getLogger(__name__)
LOCAL_POLL_SECONDS, REMOTE_POLL_SECONDS = 0.02, 1.0
"""Between two looks for a version of the policy, in a local folder and in an object store."""
NEXT_SECONDS = 0.5
"""A wait for a group is this long at most, so that the end of the run is heard."""
T = TypeVar("T")
OnStep = Callable[[StepEntry, list[Group], float], None]


def head_of(config: TrainConfig, prompts: Prompts, tokenizer: dict[str, object], vocabulary_size: int) -> Manifest:
    """Return the manifest of a run's rollouts before the first step.

    Args:
        config: the run's settings.
        prompts: the prompts.
        tokenizer: see `Manifest`.
        vocabulary_size: rows of the embedding.
    """
    rollouts = config.rollouts
    assert rollouts is not None
    return Manifest(
        sequence_length=rollouts.sequence_length or config.model.max_sequence_length,
        token_dtype="uint16" if vocabulary_size <= 1 << 16 else "uint32", vocabulary_size=vocabulary_size,
        tokenizer=tokenizer, recipe_hash=prompts.hash, evaluation_sets=(), documents=0, shards=(), kind=ROLLOUTS,
        to_come=MOST_WAVES)


def open_set(folder: Store, head: Manifest) -> Growing:
    """Return the run's set of rollouts as far as it is written; begin it if there is none.

    Args:
        folder: of the set.
        head: see `head_of`.

    Raises:
        RolloutError: the set was begun with other prompts, another tokenizer or another length.
    """
    if not folder.exists(GROWING):
        folder.create(GROWING, json.dumps(growing.head_of(head)).encode())  # or another driver has just done so
    known = Growing.of(growing.read_set(folder))
    if growing.head_of(known.head().manifest) != growing.head_of(head):
        raise RolloutError("the run was begun with other prompts, another tokenizer or another sequence length",
                           where=folder.uri, fix="restore them, or start a new run with another run.id")
    return known


class Collector:
    """Makes the waves of a run, one for each step.

    Args:
        config: the run's settings.
        prompts: the prompts.
        known: the set as far as it is written.
        pool: samples and judges groups.
        on_step: told of each step that is done: its entry, its groups, and the seconds it took.
        ended: ends the work.
    """

    def __init__(self, config: TrainConfig, prompts: Prompts, known: Growing, pool: Pool, *, on_step: OnStep,
                 ended: threading.Event) -> None:
        assert config.rollouts is not None
        self._config, self._rollouts = config, config.rollouts
        self._prompts, self._known, self._pool = prompts, known, pool
        self._on_step, self._ended = on_step, ended
        self._before: dict[int, tuple[Group, Policy]] = {}  # done when a driver before this one ended
        self._run, self._folder = storage.store(config.run_uri), storage.store(config.data.uri)
        self._stages = config.parallel.pipeline
        self._repeats = self._rollouts.engine.REPEATS
        self._kept = Kept(self._folder, config) if self._repeats else Stored(self._folder, config)
        self._poll = REMOTE_POLL_SECONDS if storage.is_remote(config.run_uri) else LOCAL_POLL_SECONDS

    def collect(self) -> None:
        """Make the waves that are missing.

        Raises:
            RolloutError: too many groups failed, or had equal rewards.
            OwnershipError: another driver has written a wave meanwhile.
        """
        done = len(self._known.manifest.waves)
        last = self._patiently(self._last_entry)
        self._before = self._patiently(self._kept.load)
        first = last.next if last is not None else 0
        for step in self._first_steps(done):
            number = self._rollouts.version_for(step)
            version = wait_for(self._run, number, self._stages, poll=self._poll, ended=self._ended)
            if version is None:
                return
            began = time.monotonic()
            collected = self._step(step, first, version)
            if collected is None:
                return
            entry, groups = collected
            self._on_step(entry, groups, time.monotonic() - began)
            first = entry.next

    def _patiently(self, function: Callable[[], T]) -> T:
        return patiently(function, self._config, self._ended)

    def _last_entry(self) -> StepEntry | None:
        """Return the ledger's entry of the newest wave, None before the first."""
        done = len(self._known.manifest.waves)
        if not done:
            return None
        return ledger.read(self._folder, self._rollouts.first_step(done), self._known.manifest.shards[-1].name)

    def _first_steps(self, done: int) -> range:
        """Return the first step of each wave behind the first `done`."""
        return range(self._rollouts.first_step(done + 1), self._config.steps + 1, self._rollouts.wave_steps)

    def _step(self, step: int, first: int, version: Version) -> tuple[StepEntry, list[Group]] | None:
        """Sample the groups of a step and write its wave; return None if the work is ended."""
        needed = self._config.wave_groups
        policy = Policy(version.number, version.digest)
        results: dict[int, Group] = {}
        behind = first  # the next position to be sampled
        while True:
            admitted = [position for position in sorted(results) if self._reason(results[position]) == ""]
            unknown = behind - first - len(results)
            jobs = []
            while len(admitted) + unknown < needed:
                self._check(step, results)
                before = self._before.pop(behind, None)
                if before is not None and before[1] == policy:
                    results[behind] = before[0]
                    admitted += [behind] * (self._reason(before[0]) == "")
                else:
                    jobs.append(Job(behind, self._prompts.at(behind), version))
                    unknown += 1
                behind += 1
            self._give(jobs)
            if not unknown:
                break
            group = None
            while group is None:
                if self._ended.is_set():
                    return None
                group = self._pool.next(NEXT_SECONDS)
                self._kept.write_due()
            results[group.position] = group
            if not group.failure:
                self._kept.add(group, policy)
        groups = [results[position] for position in admitted]
        dropped = tuple(Dropped(position, group.prompt_id, self._reason(group))
                        for position, group in sorted(results.items()) if self._reason(group))
        entry = self._write(groups, StepEntry(step, first, behind, version.number, version.digest, "", tuple(admitted),
                                              dropped))
        self._kept.keep_only(set())
        return entry, list(results.values())

    def _give(self, jobs: list[Job]) -> None:
        """Give jobs to the pool."""
        for job in self._patiently(lambda: self._kept.begin(jobs)):
            self._pool.submit(job)

    def _write(self, groups: list[Group], entry: StepEntry) -> StepEntry:
        """Write a step's shard, entry and wave; return the entry with the name of the shard.

        The groups are the same if storage is away meanwhile and all of it is written again.
        """
        return self._patiently(lambda: self._write_once(groups, entry))

    def _write_once(self, groups: list[Group], entry: StepEntry) -> StepEntry:
        self._kept.flush()
        [info] = [write_shard(self._folder, table_of(groups, self._rollouts, self._prompts,
                                                     self._known.manifest.token_dtype))]
        reward, environment = self._rollouts.judge_keys()
        entry = replace(entry, shard=info.name, reward=reward, environment=environment, epochs=self._rollouts.epochs,
                        minibatches=self._rollouts.minibatches,
                        engine=self._rollouts.engine.key())
        if not self._repeats:
            entry = replace(entry, rollouts=tuple(hash_of(group) for group in groups),
                            again=tuple(group.position for group in groups if group.again))
        ledger.write(self._folder, entry)
        self._known = growing.publish(self._folder, self._known, [info], alone=False)
        return entry

    def _reason(self, group: Group) -> str:
        """Return why a group is dropped, "" if it is not."""
        if group.failure:
            return group.failure
        return EQUAL if self._rollouts.resample and len(set(group.rewards)) == 1 else ""

    def _check(self, step: int, results: dict[int, Group]) -> None:
        """Raise RolloutError if more groups of a step were dropped than the settings allow."""
        settings = self._rollouts
        needed = self._config.wave_groups
        failed = [group for group in results.values() if group.failure]
        if len(failed) > max(1, int(settings.most_failed_fraction * needed)):
            last = failed[-1]
            raise RolloutError(
                f"{len(failed)} of {len(results)} groups of step {step} failed, the last one ({last.prompt_id}) "
                f"because: {last.failure}{': ' + last.detail if last.detail else ''}", where=settings.prompts,
                fix="mend the reward or the prompts, or raise rollouts.most_failed_fraction; the run continues where "
                    "it stopped")
        if len(results) > settings.most_resampled * needed:
            raise RolloutError(
                f"{len(results)} groups of step {step} were sampled for the {needed} that it needs: in the others all "
                "rewards are equal", where=settings.prompts,
                fix="give prompts that the policy solves sometimes, or set rollouts.resample to false")


def table_of(groups: list[Group], settings: RolloutsConfig, prompts: Prompts, token_dtype: str) -> pa.Table:
    """Return the groups of a step as a table with the columns of `shards.format.rollout_schema`.

    Args:
        groups: the admitted ones, in order.
        settings: from rewards to advantages.
        prompts: the prompts.
        token_dtype: of the set.
    """
    columns: dict[str, list[Any]] = {name: [] for name in rollout_schema(token_dtype).names}
    for group, given in zip(groups, credits([judged(group) for group in groups], settings)):
        prompt = prompts.at(group.position)
        for sample, (answer, reward, credit) in enumerate(zip(group.answers, group.rewards, given)):
            columns["prompt_id"].append(group.prompt_id)
            columns["sample"].append(sample)
            columns["prompt_length"].append(len(prompt.tokens))
            columns["tokens"].append([*prompt.tokens, *answer.tokens])
            learnt = answer.learnt
            columns["learnt"].append(learnt)
            columns["log_probabilities"].append(answer.log_probabilities)
            columns["versions"].append([group.version if sampled else NO_VERSION for sampled in learnt])
            columns["reference"].append(group.referred[sample] if group.referred else [])
            columns["reward"].append(reward)
            columns["advantage"].append(credit.advantage)
            columns["advantages"].append(spread(credit.advantages, learnt))
            columns["values"].append(group.values[sample] if group.values else [])
            columns["returns"].append(spread(credit.returns, learnt))
    return pa.table(columns, schema=rollout_schema(token_dtype))


def judged(group: Group) -> list[Judged]:
    """Return the answers of a group with what their advantages follow from."""
    nothing: tuple[list[float], ...] = ([],) * len(group.answers)
    answers = []
    for answer, reward, *columns in zip(group.answers, group.rewards, group.referred or nothing,
                                        group.values or nothing):
        learnt = answer.learnt
        of_sampled = ([value for value, its in zip(column, learnt) if its]
                      for column in (answer.log_probabilities, *columns))
        answers.append(Judged(reward, *of_sampled))
    return answers


def spread(values: Sequence[float], learnt: Sequence[int]) -> list[float]:
    """Return values of the tokens that the policy sampled as values of all tokens, 0 for the others; [] for none.

    Args:
        values: of the sampled tokens, in order.
        learnt: 1 for each token that was sampled, 0 for each other one.
    """
    following = iter(values)
    return [next(following) if its else 0.0 for its in learnt] if values else []
