"""The ledger of a run's rollouts: which groups each step admitted, which were dropped and why.

With the schedule `recorded` an entry also has the order in which groups were admitted, the policy that sampled each of
them, and the prompts that generators still had.

`steps/00000012-SHARD.json` in the folder of rollouts belongs to the wave that step 12 begins with, if the wave has the
shard whose name begins so, and is written before the wave's record commits both. So of two drivers, neither can replace
the entry of the other's wave. `rollouts.jsonl` in the run's folder is a log of what happened on the way: leases, losses
and times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tidewheel.errors import ShardError, StorageAwayError, StorageError
from tidewheel.shards.manifest import REBUILD, Fields
from tidewheel.storage import Store

FORMAT = 1
EQUAL = "equal rewards"
"""Reason of groups that `rollouts.resample` leaves out."""
LOG = "rollouts.jsonl"


@dataclass(frozen=True)
class Dropped:
    """A group that no step trains on."""

    position: int
    prompt_id: str
    reason: str


@dataclass(frozen=True)
class Policy:
    """A version of the policy."""

    version: int
    """Step after which it was published."""
    weights: str
    """Digest of its weights."""


@dataclass(frozen=True)
class StepEntry:
    """What a wave took from the order of the prompts. Its steps, one or more, train on the same groups.

    The positions from `first` to before `next`, and those that were `open` after the step before, are each admitted,
    dropped or `open`.
    """

    step: int
    """The first step that trains on the wave."""
    first: int
    next: int
    version: int
    """Step after which the policy was published that sampled the groups; the newest one, if there are several."""
    weights: str
    """Digest of that policy."""
    shard: str
    """Name of the wave's shard, which holds its hash."""
    admitted: tuple[int, ...]
    """Positions of the groups that the step trains on: rising, or as they were admitted."""
    dropped: tuple[Dropped, ...]
    reward: str = ""
    """Key of the reward: a hash of its name, version, settings and own source."""
    environment: str = ""
    """Key of the environment."""
    open: tuple[int, ...] = ()
    """Positions before `next` whose groups were still being sampled, or had no room in the step."""
    policies: tuple[Policy, ...] = ()
    """Policies that sampled the admitted groups, if the schedule is recorded."""
    sampled_by: tuple[int, ...] = ()
    """Index in `policies` for each of the admitted groups, if the schedule is recorded."""
    epochs: int = 1
    """Passes over the wave; `batches.jsonl` has the groups of each step."""
    minibatches: int = 1
    """Steps of a pass."""
    engine: str = ""
    """Key of the engine that sampled."""
    rollouts: tuple[str, ...] = ()
    """Hash of each admitted group's rollouts, see `stored.group_hash`, if the engine cannot repeat them."""
    again: tuple[int, ...] = ()
    """Positions of admitted groups that were begun before and lost, if the engine cannot repeat them: these are other
    rollouts."""

    @property
    def versions(self) -> list[int]:
        """Return the version of the policy that sampled each admitted group."""
        if not self.policies:
            return [self.version] * len(self.admitted)
        return [self.policies[index].version for index in self.sampled_by]

    @property
    def lags(self) -> list[int]:
        """Return for each admitted group how many versions its policy is behind the one that the first step trains."""
        return [self.step - 1 - version for version in self.versions]

    def reasons(self) -> Counter[str]:
        """Return the number of dropped groups by reason."""
        return Counter(group.reason for group in self.dropped)


def key_of(step: int, shard: str) -> str:
    """Return the key of a step's entry in the folder of rollouts.

    Args:
        step: the step.
        shard: name of its wave's shard.
    """
    return f"steps/{step:08d}-{shard[:16]}.json"


def write(folder: Store, entry: StepEntry) -> None:
    """Write the entry of a step."""
    folder.write_json(key_of(entry.step, entry.shard), {"format": FORMAT, **asdict(entry)})


def read(folder: Store, step: int, shard: str) -> StepEntry:
    """Return the entry of a step.

    Args:
        folder: of the rollouts.
        step: the step.
        shard: name of its wave's shard.

    Raises:
        ShardError: it is missing or damaged.
    """
    key = key_of(step, shard)
    where = folder.at(key)
    try:
        values: Any = folder.read_json(key)
    except FileNotFoundError:
        raise ShardError("the ledger's entry of this step is missing", where=where, fix=REBUILD) from None
    except StorageAwayError:
        raise
    except StorageError as error:
        raise ShardError(error.what, where=where, fix=REBUILD) from None
    fields = Fields(values, where)
    fields.one_of("format", (FORMAT,))
    fields.one_of("step", (step,))
    dropped = tuple(Dropped(group.number("position"), group.text("prompt_id"), group.text("reason"))
                    for group in fields.groups("dropped"))
    return StepEntry(step, fields.number("first"), fields.number("next"), fields.number("version"),
                     fields.text("weights"), fields.text("shard"), tuple(fields.numbers("admitted")), dropped,
                     reward=str(values.get("reward", "")), environment=str(values.get("environment", "")),
                     epochs=int(values.get("epochs", 1)), minibatches=int(values.get("minibatches", 1)),
                     engine=str(values.get("engine", "")), **_stored(fields), **_recorded(fields))


def _stored(fields: Fields) -> dict[str, Any]:
    """Return the fields of a step that only engines have that cannot repeat rollouts."""
    rollouts = fields.values.get("rollouts", [])
    if not isinstance(rollouts, list) or any(not isinstance(value, str) for value in rollouts):
        fields.wrong("rollouts", "a list of hashes")
    return {"rollouts": tuple(rollouts), "again": tuple(fields.numbers("again")) if fields.values.get("again") else ()}


def _recorded(fields: Fields) -> dict[str, Any]:
    """Return the fields of a step that only the schedule `recorded` has."""
    if not fields.values.get("policies"):
        return {}
    policies = tuple(Policy(policy.number("version"), policy.text("weights")) for policy in fields.groups("policies"))
    sampled_by = tuple(fields.numbers("sampled_by"))
    if len(sampled_by) != len(fields.values["admitted"]) or any(index >= len(policies) for index in sampled_by):
        fields.wrong("sampled_by", "the index of a policy for each admitted group")
    return {"open": tuple(fields.numbers("open")), "policies": policies, "sampled_by": sampled_by}
