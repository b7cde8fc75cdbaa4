"""Groups that are done and in no step yet, kept in the run's folder for a driver that takes over.

A file of JSON is written when some seconds have passed since the last one, so slow rollouts cost one write each, and
fast ones none. A file is removed when steps have all its groups. The ledger does not depend on these files: if one is
missing or damaged, or the run goes on with another recipe, its groups are sampled again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tidewheel.errors import StorageAwayError
from tidewheel.inference.group import Answer
from tidewheel.post.fetching import Fetched
from tidewheel.post.groups import Group, Job
from tidewheel.post.ledger import Policy
from tidewheel.storage import Store, content_hash
from tidewheel.train.config import TrainConfig

logger = logging.getLogger(__name__)
FOLDER = "done"
KEEP_SECONDS = 5.0
"""Between two writes: the most work of a driver that is lost with it."""


class Kept:
    """The groups of a run that no step has.

    Args:
        folder: of the run's rollouts.
        config: the run's settings.
    """

    FOLDER = FOLDER
    ENDING = ".json"

    def __init__(self, folder: Store, config: TrainConfig) -> None:
        self._folder = folder
        self._recipe = [config.recipe_hash(), *(code.hash for code in config.own_parts().values())]
        self._files: dict[str, set[int]] = {}  # positions of the groups of each file that no step has
        self._new: dict[int, tuple[Group, Policy]] = {}
        self._since = time.monotonic()

    def load(self) -> dict[int, tuple[Group, Policy]]:
        """Return the groups that a driver before this one has kept, by position, with the policy that sampled each."""
        groups: dict[int, tuple[Group, Policy]] = {}
        for entry in self._folder.list(self.FOLDER):
            try:
                read = self._read(entry.key)
            except (ValueError, TypeError, KeyError) as error:
                logger.warning("%s is damaged, its groups are sampled again: %s", self._folder.at(entry.key), error)
                self._folder.delete(entry.key)
                continue
            self._files[entry.key] = {group.position for group, _ in read}
            groups |= {group.position: (group, policy) for group, policy in read}
        return groups

    def _read(self, key: str) -> list[tuple[Group, Policy]]:
        """Return the groups of a file, none if it is of another recipe."""
        data = self._folder.read(key)
        if self.key_of(data) != key:
            raise ValueError("its hash differs")
        return self._parse(data)

    def _parse(self, data: bytes) -> list[tuple[Group, Policy]]:
        content = json.loads(data)
        return [_parsed(values) for values in content["groups"] if content["recipe"] == self._recipe]

    def begin(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that are about to be given out, and whether each was given out and lost before.

        Args:
            jobs: not given out yet.
        """
        return list(jobs)

    def flush(self) -> None:
        """Write what must be in storage before a step may have it."""

    def add(self, group: Group, policy: Policy) -> None:
        """Keep a group that is done, with the policy that sampled it; write those so far if it is time."""
        self._new[group.position] = (group, policy)
        self.write_due()

    def write_due(self) -> None:
        """Write the groups that are not written yet, if it is time."""
        if not self._new or time.monotonic() - self._since < KEEP_SECONDS:
            return
        groups = [_values(group, policy) for group, policy in self._new.values()]
        data = json.dumps({"recipe": self._recipe, "groups": groups}).encode()
        try:
            self._folder.write(self.key_of(data), data)
        except StorageAwayError as error:
            logger.warning("groups that are done are not kept yet: %s", error)
            self._since = time.monotonic()
            return
        self._files[self.key_of(data)] = set(self._new)
        self._new = {}
        self._since = time.monotonic()

    def keep_only(self, positions: set[int], given: set[int] | None = None) -> None:
        """Forget all groups but those at these positions, and remove the files that have none of them.

        Args:
            positions: of groups that are done and in no step.
            given: positions that are given out.
        """
        self._new = {position: kept for position, kept in self._new.items() if position in positions}
        for key in [key for key, inside in self._files.items() if not inside & positions]:
            try:
                self._folder.delete(key)
            except StorageAwayError as error:  # a later step removes it
                logger.warning("groups that steps have are still kept: %s", error)
                return
            del self._files[key]

    def key_of(self, data: bytes) -> str:
        """Return the key of a file with this content."""
        return f"{self.FOLDER}/{content_hash(data).removeprefix('blake3-')[:32]}{self.ENDING}"


def _parsed(values: dict[str, Any]) -> tuple[Group, Policy]:
    """Return a group and its policy from their JSON values."""
    fields = dict(values)
    policy, answers, rewards, fetched = (fields.pop(name) for name in ("policy", "answers", "rewards", "fetched"))
    referred, values_of_tokens = fields.pop("referred"), fields.pop("values")
    answers = [Answer(**{**answer, "written": frozenset(answer["written"])}) for answer in answers]
    group = Group(**fields, answers=tuple(answers), rewards=tuple(rewards), fetched=Fetched(**fetched),
                  referred=tuple(referred), values=tuple(values_of_tokens))
    return group, Policy(**policy)


def _values(group: Group, policy: Policy) -> dict[str, Any]:
    """Return what `_parsed` reads."""
    values = {**asdict(group), "policy": asdict(policy)}
    for answer in values["answers"]:
        answer["written"] = sorted(answer["written"])
    return values
