"""Who takes part in a round: marks of the groups in storage, and the decision that is made once.

A round is decided when every group that is expected has published its outer gradient, or when the group that looks has
waited long enough. Expected are the groups that said so when they took the last outer state, and the members of the
last round. So a group that died costs one wait, and one that comes back is waited for from its next round on.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.outer.decisions import Decision, Decisions
from tidewheel.storage import Store
from tidewheel.train.outer_config import OuterConfig

FOLDER = "meetings"
PRESENT, OFFER, GONE = "present", "offer", "gone"
OWN_SETTINGS = {"group", "store", "error_feedback", "patience_seconds"}
"""Settings in which groups may differ."""
SHARED_IDENTITY = ("model", "global_sequences", "ramp", "data_seed", "shards", "vocabulary_size")


@dataclass(frozen=True)
class Member:
    """A group in the decision of a round, with its outer gradient."""

    group: int
    offer: str
    """Name of the set of tensors."""
    hash: str
    """Of the set's manifest."""


@dataclass(frozen=True)
class Round:
    """The fields of the decision of a round."""

    round: int
    by: int
    """The group that made it."""
    members: tuple[Member, ...]
    state: str = ""
    """Name of the outer state of round 0, of which each group has one. Later names follow from the round."""


@dataclass
class Meetings:
    """The rounds of one fragment, as rank 0 of a group sees them.

    Args:
        store: the fragment's folder.
        group: this group.
        groups: number of groups.
    """

    store: Store
    group: int
    groups: int

    def __post_init__(self) -> None:
        self.decisions = Decisions(self.store.child("decisions"), Round)

    def announce(self, round_: int) -> None:
        """Say that this group will take part in a round, so that the others wait for it."""
        self.store.delete(self._key(round_, GONE))
        self.store.write_json(self._key(round_, PRESENT), {"time": time.time()})

    def leave(self, round_: int) -> None:
        """Say that this group has finished its run, so that the others do not wait for it."""
        self.store.write_json(self._key(round_, GONE), {"time": time.time()})

    def offer(self, round_: int, name: str, digest: str) -> None:
        """Publish this group's outer gradient of a round; a later one takes the place of an earlier one.

        Args:
            round_: the round.
            name: of the set of tensors.
            digest: hash of its manifest.
        """
        self.store.write_json(self._key(round_, OFFER), {"offer": name, "hash": digest})

    def has_offered(self, round_: int) -> bool:
        """Return whether this group has published its outer gradient of a round."""
        return self.store.exists(self._key(round_, OFFER))

    def look(self, round_: int, last: Decision | None, *, patient: bool) -> Decision | None:
        """Return the decision of a round, which this call makes if it can; None: groups are missing.

        Args:
            round_: the round, in which this group has made an offer.
            last: the decision of the round before; None: it is no longer kept.
            patient: whether to wait on for groups that are expected.
        """
        decided = self.decisions.get(round_)
        if decided is not None or (patient and self.missing(round_, last)):
            return decided
        members = [{"group": group, **self.store.read_json(self._key(round_, OFFER, group))}
                   for group in sorted(self._marks(round_)[OFFER])]
        return self.decisions.decide(round_, {"round": round_, "by": self.group, "members": members,
                                              "time": time.time()})

    def missing(self, round_: int, last: Decision | None) -> list[int]:
        """Return the groups that are expected in a round and have made no offer. In the first round all are expected.

        Args:
            round_: the round.
            last: see `look`.
        """
        marks = self._marks(round_)
        before = members_of(last) or set(range(self.groups))
        return sorted((before | marks[PRESENT]) - marks[GONE] - marks[OFFER])

    def _marks(self, round_: int) -> dict[str, set[int]]:
        marks: dict[str, set[int]] = {PRESENT: set(), OFFER: set(), GONE: set()}
        for entry in self.store.list(f"{FOLDER}/{round_:08d}"):
            group, _, kind = entry.key.rpartition("/")[2].removesuffix(".json").partition("-")
            if kind in marks and group.isdigit() and int(group) < self.groups:
                marks[kind].add(int(group))
        return marks

    def _key(self, round_: int, kind: str, group: int | None = None) -> str:
        return f"{FOLDER}/{round_:08d}/{self.group if group is None else group:04d}-{kind}.json"


def members_of(decision: Decision | None) -> set[int]:
    """Return the groups whose outer gradients a round averages; none if the round is not decided or not kept."""
    return set() if decision is None else {int(member["group"]) for member in decision["members"]}


def agree(store: Store, config: OuterConfig, identity: dict[str, Any], run: str) -> None:
    """Record what all groups share and which run this group is, or compare it with what is recorded.

    Args:
        store: where the groups meet.
        config: settings of this group.
        identity: `train.checks.identity` of its run.
        run: URI of its run.

    Raises:
        ConfigError: another group came first with other settings, or another run is this group.
    """
    shared = config.model_dump(mode="json", exclude=OWN_SETTINGS) | {name: identity[name] for name in SHARED_IDENTITY}
    shared = json.loads(json.dumps(shared))
    recorded = Decisions(store.child("settings")).decide(0, shared)
    different = [f"{name} is {recorded.get(name)} there, {value} here" for name, value in shared.items()
                 if recorded.get(name) != value]
    if different:
        raise ConfigError(f"the groups that meet here have other settings: {'; '.join(different)}"[:500],
                          where=store.at("settings"),
                          fix="give all groups the same, or another outer.store for another run")
    member = store.child("groups", f"{config.group:04d}")
    other = Decisions(member).decide(0, {"run": run})["run"]
    if other != run:
        raise ConfigError(f"group {config.group} of the groups that meet here is the run {other}", where=member.uri,
                          fix="give each run an outer.group of its own, continue that run, or give another outer.store")
