"""The record of a DiLoCo run: every round, outer gradient and outer state of its groups, computed again.

The groups keep a few rounds. `Witness` links each file of their folder into another one before it is deleted. `examine`
then computes each outer state from the one before and the outer gradients that the decision names, with numpy alone,
and compares the bits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidewheel.checkpoint.manifest import read_manifest, step_name
from tidewheel.checkpoint.peers import Peers
from tidewheel.errors import TidewheelError
from tidewheel.outer import quantise
from tidewheel.outer.files import Folder
from tidewheel.storage import store
from tidewheel.storage.folder import TEMPORARY_PREFIX
from tidewheel.train.outer_config import OuterConfig

POLL_SECONDS = 0.1
DECIDED = ("decisions", "takes")
"""Folders whose files never change."""
Arrays = dict[str, np.ndarray]


@dataclass
class Witness:
    """Links the files of the groups' folder into `record` until it is closed, in a thread.

    Args:
        folder: the groups' folder.
        record: of the same file system.
    """

    folder: Path
    record: Path
    changed: set[str] = field(default_factory=set)
    """Decisions that have changed after they were made."""
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Witness:
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Link what is new, and compare the decisions with what they were."""
        for path in self._files():
            copy = self.record / path.relative_to(self.folder)
            with contextlib.suppress(FileNotFoundError):  # the groups have deleted it meanwhile
                if not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, copy)
                elif _is_decided(path) and not path.samefile(copy) and path.read_bytes() != copy.read_bytes():
                    self.changed.add(str(path.relative_to(self.folder)))

    def _files(self) -> Iterator[Path]:
        for parent, _, names in os.walk(self.folder):
            for name in names:
                if not name.startswith(TEMPORARY_PREFIX):
                    yield Path(parent, name)


def _is_decided(path: Path) -> bool:
    return path.stem.isdigit() and any(name in path.parts for name in DECIDED)


@dataclass(frozen=True)
class Take:
    """A record that a group goes on after a step from the outer state of a round."""

    step: int
    round: int
    sent: int
    """Step whose weights the outcome includes; -1: it includes none of this group's."""
    gone: bool = False
    """The group repeated steps and no longer found the round that it had taken, so it took a newer one."""

    @property
    def covered(self) -> int:
        """Last step whose weights the group need not send any more."""
        return self.sent if self.sent >= 0 else self.step


@dataclass
class Rounds:
    """The rounds of one fragment.

    Args:
        folder: its record.
        config: settings of the groups.
    """

    folder: Path
    config: OuterConfig
    problems: list[str] = field(default_factory=list)
    states: dict[int, Arrays] = field(default_factory=dict)
    """Outer states by round, as computed here."""
    committed: int = 0
    """Committed outer states that were compared."""

    def __post_init__(self) -> None:
        self.decisions = _records(self.folder / "decisions")
        self._offers = Folder(store(self.folder / "offers"), Peers(), lambda request: request())
        self._states = Folder(store(self.folder / "checkpoints"), Peers(), lambda request: request())

    def takes(self, group: int, gone: dict[tuple[int, int], int] | None = None) -> list[Take]:
        """Return what a group has taken, in order.

        Args:
            group: the group.
            gone: {(step, round): newer round} of its events `outer_history_gone`.
        """
        found = []
        for record in _records(self.folder / "takes" / f"group_{group:04d}"):
            newer = (gone or {}).get((record["step"], record["round"]))
            found.append(Take(record["step"], newer or record["round"], record["sent"], newer is not None))
        return found

    def members(self, number: int) -> list[int]:
        """Return the members of a round, [] of one that is not decided."""
        return [member["group"] for member in self.decisions[number]["members"]] if number < len(self.decisions) else []

    def offer(self, number: int, group: int) -> dict[str, torch.Tensor]:
        """Return the tensors that a member has sent in a round, verified against the decision.

        Raises:
            TidewheelError: they are not what the round was decided with.
        """
        member = next(member for member in self.decisions[number]["members"] if member["group"] == group)
        return _tensors(self._offers, member["offer"], member["hash"])

    def examine(self) -> None:
        """Compute every round and note what differs from its promise."""
        for number, decision in enumerate(self.decisions):
            if decision["number"] != number or decision["round"] != number:
                self.problems.append(f"round {number} is recorded as {decision}")
            members = self.members(number)
            if members != sorted(set(members)) or (number and not members):
                self.problems.append(f"round {number} has the members {members}")
            try:
                self._examine(number, members)
            except (TidewheelError, OSError) as error:
                self.problems.append(f"round {number}: {error}")
                return

    def _examine(self, number: int, members: list[int]) -> None:
        name = self.decisions[number].get("state", step_name(number))
        stored: Arrays | None = None
        if (self.folder / "checkpoints" / name / "manifest.json").exists():
            stored = {key: tensor.numpy() for key, tensor in _tensors(self._states, name).items()}
            self.committed += 1
        if number == 0:
            assert stored is not None, "the first outer state is committed before it is decided"
            self.states[0] = stored
            return
        gradients = [_decoded(self.offer(number, group), self.states[number - 1], self.config) for group in members]
        self.states[number] = outer_step(self.states[number - 1], gradients, self.config)
        if stored is not None:
            different = [key for key, value in self.states[number].items() if not np.array_equal(stored[key], value)]
            if different or stored.keys() != self.states[number].keys():
                self.problems.append(f"the outer state of round {number} is not the outcome of its {len(members)} "
                                     f"outer gradients: {different[:3]}")

    def examine_takes(self, group: int, takes: list[Take], steps: int) -> None:
        """Note what is wrong with the outcomes that a group has taken: their order, and steps that counted twice.

        Args:
            group: the group.
            takes: as `takes` returns them.
            steps: of the run.
        """
        for before, after in itertools.pairwise(takes):
            if after.step < before.step or (after.round <= before.round and not before.gone):
                self.problems.append(f"group {group} took round {after.round} after step {after.step}, and before that "
                                     f"round {before.round} after step {before.step}")
        sent = [number for number in range(1, len(self.decisions)) if group in self.members(number)]
        for number in sent:
            index = next((index for index, take in enumerate(takes) if take.round == number - 1), None)
            if index is None:
                gone = [take for take in takes if take.gone]
                if not gone:
                    self.problems.append(f"group {group} is in round {number}, but it never took round {number - 1}")
                continue
            end = sends_after(takes[index], self.config, steps)
            following = takes[index + 1] if index + 1 < len(takes) else None
            if end is None or (following is not None and following.step < end and not following.gone):
                self.problems.append(f"group {group} sent its steps {takes[index].covered + 1} to {end} in round "
                                     f"{number}, but went on from step {following and following.step}")


def sends_after(take: Take, config: OuterConfig, steps: int) -> int | None:
    """Return the step after which a group sends its next outer gradient; None: it has finished."""
    return min(take.covered + config.every, steps) if take.covered < steps else None


def outer_step(state: Arrays, gradients: list[Arrays], config: OuterConfig) -> Arrays:
    """Return the outer state that follows: Nesterov momentum on the mean, one fp32 rounding for each operation.

    Args:
        state: {"model/NAME": fp32, "optimizer/NAME.momentum": fp32}.
        gradients: {"NAME": fp32} of each member, in the order of groups.
        config: settings of the groups.
    """
    rate, mu = np.float32(config.learning_rate), np.float32(config.momentum)
    after: Arrays = {}
    for name in gradients[0]:
        total = gradients[0][name]
        for other in gradients[1:]:
            total = total + other[name]
        step = total / np.float32(len(gradients))
        if config.averages_weights:
            after[f"model/{name}"] = step
            continue
        if config.momentum:
            velocity = state[f"optimizer/{name}.momentum"] * mu + step
            after[f"optimizer/{name}.momentum"] = velocity
            step = step + velocity * mu
        after[f"model/{name}"] = state[f"model/{name}"] - step * rate
    return after


def _decoded(offer: dict[str, torch.Tensor], state: Arrays, config: OuterConfig) -> Arrays:
    found = {}
    for key, weight in state.items():
        kind, _, name = key.partition("/")
        if kind == "model":
            parts = {part: offer[f"{part}/{name}"] for part in (quantise.VALUES, quantise.SCALES)
                     if f"{part}/{name}" in offer}
            width = weight.shape[-1] if weight.ndim else 1
            found[name] = quantise.decode(parts, config.quantise, width).numpy()
    return found


def _tensors(folder: Folder, name: str, expected: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors of a set, each file verified."""
    manifest = read_manifest(folder.store, name)
    flat = {path: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for path, entry in manifest.tensors.items()}
    folder.read(name, flat, expected)
    return flat


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return the decisions in a folder, in order; the last one may be missing, none before it."""
    files = {int(path.stem): path for path in folder.glob("*.json") if path.stem.isdigit()}
    return [json.loads(files[number].read_bytes()) for number in range(len(files))]
