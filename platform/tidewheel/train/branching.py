"""Branch a run: begin a new run with the whole state that another one had at a step. The other run is only read.

`run.branch: RUN@STEP` names the parent. Model, optimizer, random states, guards, rollbacks and the position in the data
are the parent's, so the branch takes the sequences that the parent would have taken next. Several branches may be the
groups of a DiLoCo run, which take these sequences together (post-local SGD).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidewheel import storage
from tidewheel.errors import ConfigError

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig


@dataclass(frozen=True)
class Branch:
    """Where a run branches off."""

    uri: str
    """Of the parent."""
    step: int
    """Last step of the parent that the branch has."""

    @classmethod
    def parse(cls, text: str, runs: str = "") -> Branch:
        """Return the branch that RUN@STEP names.

        Args:
            text: RUN is the URI of a run, or its id if it has no slash.
            runs: folder of runs, for an id.

        Raises:
            ValueError: it has another form.
        """
        run, _, step = text.rpartition("@")
        if not run or not step.isascii() or not step.isdigit():
            raise ValueError(f"{text!r} is not RUN@STEP: give the parent run and one of its checkpoints' steps, such "
                             "as runs/base@8000")
        return cls(storage.join(runs, run) if runs and "/" not in run else run.rstrip("/"), int(step))

    def __str__(self) -> str:
        return f"{self.uri}@{self.step}"


def lineage(branch: Branch) -> dict[str, Any]:
    """Return what the branch's run.json says of its parent, and of the parent's own.

    Raises:
        ConfigError: there is no such run.
    """
    parent = read_parent(branch)
    line = {"run": branch.uri, "id": parent["id"], "step": branch.step, "recipe_hash": parent["recipe_hash"]}
    return {**line, **({"parent": parent["branch"]} if parent.get("branch") else {})}


def read_parent(branch: Branch) -> dict[str, Any]:
    """Return the parent's run.json.

    Raises:
        ConfigError: there is no such run.
    """
    store = storage.store(branch.uri)
    if not store.exists("run.json"):
        raise ConfigError(f"there is no run to branch from at {branch.uri}", where="run.branch",
                          fix="name a run that has started, as RUN@STEP: its URI, or its id below run.uri")
    run: dict[str, Any] = store.read_json("run.json")
    return run


def divides(parent: Mapping[str, Any], config: TrainConfig) -> bool:
    """Return whether a branch is one of the groups that take, together, the batches of a parent without groups.

    Args:
        parent: `checks.identity` of the parent.
        config: settings of the branch.
    """
    return (bool(config.run.branch) and config.outer is not None and parent.get("share") is None
            and parent.get("global_sequences") == config.outer.groups * config.batch.global_sequences)
