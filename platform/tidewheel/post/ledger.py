"""The ledger of a run's rollouts: which groups each step admitted, which were dropped and why.

`steps/00000012-SHARD.json` in the folder of rollouts belongs to wave 12 of the set if that has the shard which the name
begins with, and is written before the wave's record commits both. So of two drivers, neither can replace the entry of
the other's wave. `rollouts.jsonl` in the run's folder is a log of what happened on the way: leases, losses and times.
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
class StepEntry:
    """What a step took from the order of the prompts: every position from `first` to before `next`."""

    step: int
    first: int
    next: int
    version: int
    """Step after which the policy was published that sampled the groups."""
    weights: str
    """Digest of that policy."""
    shard: str
    """Name of the wave's shard, which holds its hash."""
    admitted: tuple[int, ...]
    """Positions of the groups that the step trains on, rising."""
    dropped: tuple[Dropped, ...]
    reward: str = ""
    """Key of the reward: a hash of its name, version, settings and own source."""
    environment: str = ""
    """Key of the environment."""

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
                     str(values.get("reward", "")), str(values.get("environment", "")))
