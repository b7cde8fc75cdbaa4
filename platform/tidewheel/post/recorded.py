"""Collect rollouts first come, first served, and write the choice down: the schedule `recorded`.

Generators always have work: a prompt is given out as soon as there is room within the look-ahead, and is sampled by the
newest policy of that time. A step admits groups in the order in which they are done. Its entry in the ledger has this
order, each group's policy, and the prompts that were still out, so a driver that takes over gives out exactly these.

No group becomes too old, so none is dropped for its age. The policy after wave v samples for the waves up to
v + 1 + look_ahead; a wave is a step unless it has `rollouts.epochs` or `minibatches`. A prompt is given out only while
all groups that are out fit into these waves; and a wave passes over a group with time left if older ones would then
have too few places. So a wave may wait for a slow group.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from tidewheel.errors import StorageAwayError
from tidewheel.post.collector import NEXT_SECONDS, Collector
from tidewheel.post.groups import Group, Job
from tidewheel.post.ledger import Dropped, Policy, StepEntry
from tidewheel.post.policy import Version, newest, published


class RecordedCollector(Collector):
    """Makes the waves of a run with the schedule `recorded`; see `Collector` for its arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._needed = self._config.wave_groups
        self._first = self._next = 0  # prompt that was not given out before this step, and before now
        self._waiting = deque[int]()  # positions that a driver before this one has given out
        self._out: dict[int, Version] = {}  # positions that generators have
        self._ready: dict[int, tuple[Group, Policy]] = {}  # done and in no step yet, in this order
        self._dropped: dict[int, Group] = {}  # since the last entry
        self._newest: Version | None = None
        self._looked = 0.0

    def collect(self) -> None:
        """See `Collector.collect`."""
        done = len(self._known.manifest.waves)
        last = self._patiently(self._last_entry)
        if last is not None:
            self._first = self._next = last.next
            self._waiting = deque(last.open)
        self._take_over()
        for step in self._first_steps(done):
            began = time.monotonic()
            positions = self._filled(step)
            if positions is None:
                return
            groups = [self._ready[position][0] for position in positions]
            entry = self._write(groups, self._entry(step, positions))
            sampled = [*groups, *self._dropped.values()]
            for position in positions:
                del self._ready[position]
            self._first, self._dropped = self._next, {}
            self._kept.keep_only(set(self._ready), {*self._out, *self._waiting})
            self._on_step(entry, sampled, time.monotonic() - began)

    def _take_over(self) -> None:
        """Take the groups that were done when a driver before this one ended, and give out the others that it had."""
        kept = {position: group for position, group in self._patiently(self._kept.load).items()
                if position in self._waiting or position >= self._next}
        begun = max([self._next, *(position + 1 for position in kept)])
        had = {*self._waiting, *range(self._next, begun)}
        self._ready, self._waiting, self._next = kept, deque(sorted(had - set(kept))), begun

    def _filled(self, step: int) -> list[int] | None:
        """Return the positions that a step admits, once there are enough; None if the work is ended."""
        while not self._ended.is_set():
            self._give_out(step)
            positions = admissible(
                [(position, self._deadline(policy.version)) for position, (_, policy) in self._ready.items()],
                [self._deadline(version.number) for version in self._out.values()], self._rollouts.wave_of(step),
                self._needed)
            if len(positions) == self._needed:
                return positions
            if not self._out:
                self._ended.wait(self._poll)
                continue
            group = self._pool.next(min(self._poll, NEXT_SECONDS))
            self._kept.write_due()
            if group is not None:
                version = self._out.pop(group.position)
                if self._reason(group):
                    self._dropped[group.position] = group
                    done = [group for group, _ in self._ready.values()][:self._needed]
                    self._check(step, {**self._dropped, **{group.position: group for group in done}})
                else:
                    self._ready[group.position] = (group, Policy(version.number, version.digest))
                    self._kept.add(*self._ready[group.position])
        return None

    def _deadline(self, version: int) -> int:
        """Return the last wave for which a version of the policy may sample."""
        rollouts = self._rollouts
        return min(rollouts.wave_of(version + 1) + rollouts.look_ahead, rollouts.wave_of(self._config.steps))

    def _give_out(self, step: int) -> None:
        """Give out prompts while their groups fit into the steps that the newest policy may sample for."""
        version = self._look(step)
        if version is None:
            return
        room = (self._deadline(version.number) - self._rollouts.wave_of(step) + 1) * self._needed
        jobs = []
        while len(self._ready) + len(self._out) < room:
            if self._waiting:
                position = self._waiting.popleft()
            else:
                position, self._next = self._next, self._next + 1
            jobs.append(Job(position, self._prompts.at(position), version))
            self._out[position] = version
        self._give(jobs)

    def _look(self, step: int) -> Version | None:
        """Return the newest version of the policy that may sample for a step, None if there is none."""
        if self._looked and time.monotonic() - self._looked < self._poll:
            return self._newest
        self._looked = time.monotonic()
        known = self._newest
        with contextlib.suppress(StorageAwayError):  # training, which publishes, decides for how long to wait
            if known is None or self._deadline(known.number) < self._rollouts.wave_of(step):
                self._newest = newest(self._run, self._stages)
            else:
                following = known.number + self._rollouts.wave_steps
                self._newest = published(self._run, following, self._stages) or known
        return self._newest

    def _entry(self, step: int, positions: list[int]) -> StepEntry:
        sampled = [self._ready[position][1] for position in positions]
        policies = sorted(set(sampled), key=lambda policy: (policy.version, policy.weights))
        open_positions = {*self._out, *self._ready, *self._waiting} - set(positions)
        dropped = tuple(Dropped(position, group.prompt_id, self._reason(group))
                        for position, group in sorted(self._dropped.items()))
        return StepEntry(step, self._first, self._next, policies[-1].version, policies[-1].weights, "",
                         tuple(positions), dropped, open=tuple(sorted(open_positions)), policies=tuple(policies),
                         sampled_by=tuple(policies.index(policy) for policy in sampled))


def admissible(ready: Iterable[tuple[int, int]], out: Iterable[int], wave: int, needed: int) -> list[int]:
    """Return the positions that a wave may admit, at most `needed`: in their order, but leaving room for older groups.

    Args:
        ready: position and deadline of each group that is done, in the order in which they were.
        out: deadline of each group that is still being sampled. A deadline is the last wave that may admit the group.
        wave: the wave.
        needed: groups of a wave.
    """
    ready = list(ready)
    left = Counter([*out, *(deadline for _, deadline in ready)])  # groups in no step yet, by deadline
    admitted: list[int] = []
    for position, deadline in ready:
        if len(admitted) == needed:
            break
        places = needed - len(admitted) - 1  # in this wave, after this group
        older = 0
        fits = True
        for earlier in range(wave, deadline):
            older += left[earlier]
            fits = fits and older <= places + (earlier - wave) * needed
        if fits:
            admitted.append(position)
            left[deadline] -= 1
    return admitted
