"""One fragment of the model in one group: its outer state, its outer gradient, and their sets of tensors in storage."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tidewheel.checkpoint.manifest import KEY, step_name
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.staging import local
from tidewheel.checkpoint.writing import Persist
from tidewheel.errors import CheckpointError
from tidewheel.outer import quantise
from tidewheel.outer.decisions import Decision, Decisions
from tidewheel.outer.files import Folder, placed_like
from tidewheel.outer.meeting import FOLDER, Meetings, members_of
from tidewheel.outer.rule import Tensors, mean, outer_step
from tidewheel.ownership import CHECKPOINTS
from tidewheel.storage import Store
from tidewheel.train.outer_config import OuterConfig

T = TypeVar("T")
OFFERS = "offers"
Named = Sequence[tuple[str, torch.Tensor]]
Encoded = list[dict[str, torch.Tensor]]
"""This rank's part of an outer gradient as it is sent: for each weight, the tensors of `quantise.encode`."""


@dataclass
class Progress:
    """Where a group stands with a fragment; part of its checkpoints."""

    round: int = -1
    """Round whose outer state was taken last; -1: none."""
    takes: int = 0
    """Outer states taken so far."""
    covered: int = 0
    """Last step whose weights the last outcome includes."""
    due: int = 0
    """Step after which the next outer gradient is published."""
    sent: int = -1
    """Step after which it was published, until the outcome of its round is taken; -1: it is not."""


@dataclass(frozen=True)
class Take:
    """The fields of the record of an outer state that a group has taken."""

    step: int
    """After which the group took it."""
    round: int
    joins: bool
    """Whether the group came in between two rounds."""
    sent: int
    """See `Progress`."""


class Fragment:
    """One fragment; all ranks of the group make the same calls.

    Args:
        store: the fragment's folder in the store of the groups.
        named: the fragment's weights on this rank, plain tensors or DTensors.
        config: settings of the groups.
        peers: the ranks.
        persist: runs a request, again while the store is unavailable.
        identity: what goes with outer states, so that they can be exported.
    """

    def __init__(self, store: Store, named: Named, config: OuterConfig, peers: Peers, persist: Persist,
                 identity: dict[str, Any]) -> None:
        self.store, self._named, self._config = store, named, config
        self._peers, self._persist, self._identity = peers, persist, identity
        self.meetings = Meetings(store, config.group, config.groups)
        self.takes = Decisions(store.child("takes", f"group_{config.group:04d}"), Take)
        self._offers = Folder(store.child(OFFERS), peers, persist)
        self._states = Folder(store.child(CHECKPOINTS), peers, persist)
        base = {f"model/{name}": torch.zeros_like(weight) for name, weight in named}
        moving = named if config.momentum else ()
        momenta = {f"optimizer/{name}.momentum": torch.zeros_like(weight) for name, weight in moving}
        self._state = {**base, **momenta}
        rounded = named if config.error_feedback else ()
        self.residuals = {f"residual/{name}": torch.zeros_like(weight) for name, weight in rounded}
        """What the number type of the outer gradients sent so far has rounded off, if it is added to the next one."""
        self._weights = [local(weight) for _, weight in named]
        self.base = [local(weight) for weight in base.values()]
        """This rank's part of the weights of the outer state in memory."""
        self._momenta = [local(momentum) for momentum in momenta.values()]
        self._residuals = [local(residual) for residual in self.residuals.values()]
        self.progress = Progress()
        self.replay: Decision | None = None
        """The record of the next outer state taken, if this group took it before a failure."""
        self.loaded = -1
        """Round of the outer state in memory; -1: none."""
        self._offered: Encoded | None = None
        self._reported: Counter[str] = Counter()

    def from_first(self, request: Callable[[], T]) -> T:
        """Return the answer to a request of rank 0 on all ranks; it is repeated while the store is unavailable."""
        return self._peers.from_first(lambda: self._persist(request))

    def decision(self, round_: int) -> Decision | None:
        """Return the decision of a round on all ranks; None: it is not made, or not kept."""
        return self.from_first(lambda: self.meetings.decisions.get(round_))

    def newest(self) -> int:
        """Return the number of the newest decided round on all ranks, -1 before the first."""
        return self.from_first(self.meetings.decisions.newest)

    def continue_with(self, progress: Progress) -> None:
        """Continue from this progress, and look whether this group went on from it before a failure."""
        self.progress = progress
        self._offered = None
        self.replay = self.from_first(lambda: self.takes.get(progress.takes))

    def traffic(self) -> Counter[str]:
        """Return the bytes that the group has "sent" and committed ("state"), and this rank has "read", since the last
        call."""
        total = Counter(sent=self._offers.written_bytes, state=self._states.written_bytes,
                        read=self._offers.read_bytes + self._states.read_bytes)
        since = total - self._reported
        self._reported = total
        return since

    # -- the offer -------------------------------------------------------------------------------
    @torch.no_grad()
    def gradient(self) -> Tensors:
        """Return this rank's part of the outer gradient: how far the weights have moved from the last outer state.

        With error feedback the residual is added. Where the outcome is the mean of the weights, it is the weights, so
        that no bit of them is lost.
        """
        if self._config.averages_weights:
            return [weight.clone() for weight in self._weights]
        moved = [base - weight for base, weight in zip(self.base, self._weights)]
        for part, residual in zip(moved, self._residuals):
            part += residual
        return moved

    @torch.no_grad()
    def offer(self, gradient: Tensors) -> None:
        """Make an offer of an outer gradient, and set the residuals to what it leaves out; `publish` follows."""
        self._offered = [quantise.encode(part, self._config.quantise) for part in gradient]
        for residual, part, sent in zip(self._residuals, gradient, self._decode(self._offered)):
            residual.copy_(part - sent)

    def offer_again(self) -> None:
        """Set the residuals as the outer gradient left them that this group published before a failure."""
        if not self.residuals:
            return
        try:
            self.load(self.progress.round)
            self.offer(self.gradient())
        except CheckpointError:  # the groups keep that outer state no longer
            self.clear_residuals()
        self._offered = None  # what was published counts: without reproducible mode it has other bits

    def _decode(self, encoded: Encoded) -> Iterator[torch.Tensor]:
        for tensors, weight in zip(encoded, self._weights):
            yield quantise.decode(tensors, self._config.quantise, weight.shape[-1] if weight.ndim else 1)

    def clear_residuals(self) -> None:
        """Forget what outer gradients have left out."""
        for residual in self._residuals:
            residual.zero_()

    def publish(self) -> None:
        """Publish the offer; a thread may do so while training goes on."""
        assert self._offered is not None
        round_ = self.progress.round + 1
        name = self._own_name(round_)
        digest = self._offers.write(name, round_, self._placed(self._offered), {"group": self._config.group})
        self.from_first(lambda: self.meetings.offer(round_, name, digest))

    def _own_name(self, round_: int) -> str:
        """Return a name for a set of tensors of this group that no other set has."""
        unique = self._peers.from_first(lambda: uuid.uuid4().int % 10**13)
        return step_name(round_, f"g{self._config.group + 1}{unique:013d}")

    def _placed(self, encoded: Encoded) -> dict[str, torch.Tensor]:
        """Return the tensors of an offer by path, sharded as the weights are. They share its memory."""
        placed: dict[str, torch.Tensor] = {}
        for (name, weight), tensors in zip(self._named, encoded):
            placed |= {f"{kind}/{name}": placed_like(weight, tensor) for kind, tensor in tensors.items()}
        return placed

    def _received(self, decision: Decision) -> Iterator[Tensors]:
        """Yield the outer gradient of each member, in the order of groups. An offer that is in memory is not read."""
        own = self._offered if decision["round"] == self.progress.round + 1 else None
        buffers = [quantise.encode(torch.zeros_like(weight), self._config.quantise) for weight in self._weights]
        for member in decision["members"]:
            encoded = own if member["group"] == self._config.group else None
            if encoded is None:
                encoded = buffers
                self._offers.read(member["offer"], self._placed(buffers), member["hash"])
            yield list(self._decode(encoded))

    # -- outer states ----------------------------------------------------------------------------
    def found(self) -> None:
        """Commit the weights as the outer state of round 0, unless another group was first, whose weights count."""
        for base, weight in zip(self.base, self._weights):
            base.copy_(weight)
        name = self._own_name(0)
        self._write_state(name, 0, set())
        proposed = {"round": 0, "by": self._config.group, "members": [], "state": name}
        decision = self.from_first(lambda: self.meetings.decisions.decide(0, proposed))
        self.loaded = 0
        if _state_name(0, decision) != name:
            self.loaded = -1  # to be read
            self.from_first(lambda: self._states.store.delete_tree(name))

    def load(self, round_: int) -> None:
        """Set the outer state to that of a round, unless it is that already.

        A round whose outer state nobody has committed follows from the state before and the offers; it is committed.

        Raises:
            CheckpointError: it is damaged, or neither the state nor the offers are kept.
        """
        if self.loaded == round_:
            return
        decision = self.decision(round_)
        name = _state_name(round_, decision)
        if self._states.exists(name):
            self.loaded = -1
            self._states.read(name, self._state)
            self.loaded = round_
        elif decision is not None and decision["members"]:
            self.load(round_ - 1)
            self.advance(decision)
            self.commit(round_)
        else:
            raise CheckpointError(f"the outer state of round {round_} is gone", where=self.store.at(CHECKPOINTS),
                                  fix="restore it from a copy, or start anew with another outer.store")

    def advance(self, decision: Decision) -> None:
        """Take the outer step of a round, whose last outer state is in memory."""
        gradients = mean(self._received(decision))
        self.loaded = int(decision["round"])
        if self._config.averages_weights:
            for base, average in zip(self.base, gradients):
                base.copy_(average)
        else:
            outer_step(self.base, self._momenta, gradients, learning_rate=self._config.learning_rate,
                       momentum=self._config.momentum)

    def commit(self, round_: int) -> None:
        """Commit the outer state in memory as that of a round, unless it is, and delete what is kept no longer."""
        decision = self.decision(round_)
        name = _state_name(round_, decision)
        if not self._states.exists(name):
            self._write_state(name, round_, members_of(decision))
            self.from_first(lambda: self._clean_up(round_))

    def _write_state(self, name: str, round_: int, members: set[int]) -> None:
        extra = {"identity": self._identity, "step": round_, "outer": {"round": round_, "members": sorted(members)}}
        self._states.write(name, round_, self._state, extra)

    def _clean_up(self, round_: int) -> None:
        """Delete what is kept no longer when a round is committed; on rank 0.

        That is one round, and the one before it, in case the group that had to delete it died.
        """
        newest = round_ - self._config.keep
        for old in range(max(0, newest - 1), newest + 1):
            for folder, name in ((OFFERS, step_name(old)), (CHECKPOINTS, step_name(old)), (FOLDER, f"{old:08d}")):
                keys = [entry.key for entry in self.store.list_named(folder, name)]
                for key in sorted(keys, key=lambda key: not key.endswith(KEY)):
                    self.store.delete(key)

    @torch.no_grad()
    def set_weights(self, share: float) -> None:
        """Set the weights to those of the outer state, merged with a share of what they are."""
        for base, weight in zip(self.base, self._weights):
            weight.copy_(base if not share else base + (weight - base) * share)


def _state_name(round_: int, decision: Decision | None) -> str:
    """Return the name of the outer state of a round. In round 0 the groups have different ones, so one was decided."""
    decided = "" if round_ or decision is None else str(decision.get("state", ""))
    return decided or step_name(round_)


def fragments_of(names: Sequence[str], number: int) -> list[list[str]]:
    """Return the names of the weights of each fragment.

    Layer i is in fragment i modulo `number`, what comes before the layers in the first and what comes behind them in
    the last.

    Args:
        names: of all weights, in the model's order.
        number: of fragments.
    """
    parts: list[list[str]] = [[] for _ in range(number)]
    seen = False
    for name in names:
        layer = next((int(word) for word in name.split(".") if word.isdigit()), None)
        seen = seen or layer is not None
        index = (number - 1 if seen else 0) if layer is None else layer % number
        parts[index].append(name)
    return parts
