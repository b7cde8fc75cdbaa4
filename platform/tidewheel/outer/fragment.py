"""One fragment of the model in one group: its outer state, its outer gradient, and their sets of tensors in storage."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tidewheel.checkpoint.manifest import step_name
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.staging import local
from tidewheel.errors import CheckpointError
from tidewheel.outer import quantise
from tidewheel.outer.decisions import Decision, Decisions
from tidewheel.outer.files import Folder, Persist, placed_like
from tidewheel.outer.meeting import FOLDER, Meetings
from tidewheel.outer.rule import mean, outer_step
from tidewheel.ownership import CHECKPOINTS
from tidewheel.storage import Store
from tidewheel.train.outer_config import OuterConfig

OFFERS = "offers"
Named = Sequence[tuple[str, torch.Tensor]]


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


@dataclass
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

    store: Store
    named: Named
    config: OuterConfig
    peers: Peers
    persist: Persist
    identity: dict[str, Any]
    progress: Progress = field(default_factory=Progress)
    replay: Decision | None = None
    """The record of the next outer state taken, if this group took it before a failure."""
    offered: dict[str, torch.Tensor] | None = None
    """The tensors of this group's offer, if it has made one in the next round."""
    loaded: int = -1
    """Round of the outer state in memory; -1: none."""
    sent_bytes: int = 0
    """Bytes of offers that this group has sent."""
    state_bytes: int = 0
    """Bytes of outer states that this group has committed."""
    reported: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Bytes sent, read and committed when they were last reported."""

    def __post_init__(self) -> None:
        self.meetings = Meetings(self.store, self.config.group, self.config.groups)
        self.takes = Decisions(self.store.child("takes", f"group_{self.config.group:04d}"), Take)
        self.offers = Folder(self.store.child(OFFERS), self.peers, self.persist)
        self.states = Folder(self.store.child(CHECKPOINTS), self.peers, self.persist)
        self.weights = [local(weight) for _, weight in self.named]
        self.base = {name: torch.zeros_like(weight).detach() for name, weight in self.named}
        momenta = self.named if self.config.momentum else ()
        self.momenta = {name: torch.zeros_like(weight).detach() for name, weight in momenta}
        sent_rounded = self.named if self.config.error_feedback else ()
        self.residuals = {name: torch.zeros_like(weight).detach() for name, weight in sent_rounded}
        """What the number type of the outer gradients sent so far has rounded off, if it is added to the next one."""

    @property
    def read_bytes(self) -> int:
        """Bytes that this rank has read."""
        return self.offers.read_bytes + self.states.read_bytes

    # -- the offer -------------------------------------------------------------------------------
    @torch.no_grad()
    def gradient(self) -> list[torch.Tensor]:
        """Return this rank's part of the outer gradient: how far the weights have moved from the last outer state.

        With error feedback the residual is added. Where the outcome is the mean of the weights, it is the weights, so
        that no bit of them is lost.
        """
        if self.config.averages_weights:
            return [weight.clone() for weight in self.weights]
        moved = [local(self.base[name]) - weight for (name, _), weight in zip(self.named, self.weights)]
        if self.residuals:
            torch._foreach_add_(moved, [local(residual) for residual in self.residuals.values()])
        return moved

    def prepare(self, gradient: Sequence[torch.Tensor]) -> None:
        """Make an offer in the next round of an outer gradient; `publish` follows."""
        self.offered = {}
        for (name, weight), tensors in zip(self.named, self.encode(gradient)):
            shapes = quantise.shapes(weight.shape, self.config.quantise)
            for kind, tensor in tensors.items():
                self.offered[f"{kind}/{name}"] = placed_like(weight, tensor, shapes[kind][1])

    @torch.no_grad()
    def encode(self, gradient: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Return the tensors to send for an outer gradient, and set the residuals to what they leave out of it."""
        kind = self.config.quantise
        encoded = [quantise.encode(part, kind) for part in gradient]
        for (name, weight), part, tensors in zip(self.named, gradient, encoded):
            if name in self.residuals:
                sent = quantise.decode(tensors, kind, weight.shape[-1] if weight.ndim else 1)
                local(self.residuals[name]).copy_(part - sent)
        return encoded

    def clear_residuals(self) -> None:
        """Forget what outer gradients have left out."""
        for residual in self.residuals.values():
            local(residual).zero_()

    def publish(self) -> None:
        """Publish the offer; a thread may do so while training goes on."""
        assert self.offered is not None
        round_ = self.progress.round + 1
        unique = self.peers.from_first(lambda: uuid.uuid4().int % 10**13)
        name = step_name(round_, f"g{self.config.group + 1}{unique:013d}")
        digest, sent = self.offers.write(name, round_, self.offered, {"group": self.config.group})
        self.peers.from_first(lambda: self.persist(lambda: self.meetings.offer(round_, name, digest)))
        self.sent_bytes += sent

    def _received(self, decision: Decision, own: dict[str, torch.Tensor] | None) -> Iterator[list[torch.Tensor]]:
        """Yield the outer gradient of each member, in the order of groups.

        Args:
            decision: of the round.
            own: this group's offer, which is not read; None: it is.
        """
        kind = self.config.quantise
        for member in decision["members"]:
            flat = own
            if own is None or member["group"] != self.config.group:
                flat = {}
                for name, weight in self.named:
                    for part, (dtype, shape) in quantise.shapes(weight.shape, kind).items():
                        rows = (local(weight).shape[0], *shape[1:]) if shape else ()
                        empty = torch.empty(rows, dtype=dtype, device=weight.device)
                        flat[f"{part}/{name}"] = placed_like(weight, empty, shape)
                self.offers.read(member["offer"], flat, member["hash"])
            yield [quantise.decode(self._parts(flat or {}, name), kind, weight.shape[-1] if weight.ndim else 1)
                   for name, weight in self.named]

    @staticmethod
    def _parts(flat: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        keys = (quantise.VALUES, quantise.SCALES)
        return {key: local(flat[f"{key}/{name}"]) for key in keys if f"{key}/{name}" in flat}

    # -- outer states ----------------------------------------------------------------------------
    def found(self) -> None:
        """Commit the weights as the outer state of round 0, unless another group was first, whose weights count."""
        for (name, _), weight in zip(self.named, self.weights):
            local(self.base[name]).copy_(weight)
        for momentum in self.momenta.values():
            local(momentum).zero_()
        self.loaded = 0
        if not self.commit(0, []):
            self.loaded = -1  # to be read
        self.peers.from_first(lambda: self.persist(lambda: self.meetings.decisions.decide(
            0, {"round": 0, "by": self.config.group, "members": []})))

    def load(self, round_: int) -> None:
        """Set the outer state to that of a round, unless it is that already.

        A round whose outer state nobody has committed follows from the state before and the offers; it is committed.

        Raises:
            CheckpointError: it is damaged, or neither the state nor the offers are kept.
        """
        name = step_name(round_)
        if self.loaded == round_:
            return
        if self.states.exists(name):
            self.loaded = -1
            self.states.read(name, self._flat())
            self.loaded = round_
            return
        decision = self.decision(round_)
        if decision is None or not decision["members"]:
            raise CheckpointError(f"the outer state of round {round_} is gone", where=self.store.at(CHECKPOINTS),
                                  fix="restore it from a copy, or start anew with another outer.store")
        self.load(round_ - 1)
        self.advance(decision, None)
        self.commit(round_, sorted(int(member["group"]) for member in decision["members"]))

    def advance(self, decision: Decision, own: dict[str, torch.Tensor] | None) -> None:
        """Take the outer step of a round, whose last outer state is set.

        Args:
            decision: of the round.
            own: this group's offer; None: read it.
        """
        gradients = mean(self._received(decision, own))
        self.loaded = int(decision["round"])
        base = [local(self.base[name]) for name, _ in self.named]
        if self.config.averages_weights:
            for weight, value in zip(base, gradients):
                weight.copy_(value)
            return
        outer_step(base, [local(momentum) for momentum in self.momenta.values()], gradients,
                   learning_rate=self.config.learning_rate, momentum=self.config.momentum)

    def commit(self, round_: int, members: Sequence[int]) -> bool:
        """Commit the present outer state as that of a round, unless it is committed; return whether this call did.

        Args:
            round_: the round.
            members: groups whose outer gradients it averages.
        """
        extra = {"identity": self.identity, "step": round_, "outer": {"round": round_, "members": list(members)}}
        digest, written = self.states.write(step_name(round_), round_, self._flat(), extra)
        self.state_bytes += written
        return bool(digest)

    def _flat(self) -> dict[str, torch.Tensor]:
        return {**{f"model/{name}": tensor for name, tensor in self.base.items()},
                **{f"optimizer/{name}.momentum": tensor for name, tensor in self.momenta.items()}}

    def decision(self, round_: int) -> Decision | None:
        """Return the decision of a round on all ranks; None: it is not made, or not kept."""
        return self.peers.from_first(lambda: self.persist(lambda: self.meetings.decisions.get(round_)))

    def newest(self) -> int:
        """Return the number of the newest decided round on all ranks, -1 before the first."""
        return int(self.peers.from_first(lambda: self.persist(self.meetings.decisions.newest)))

    def clean_up(self, round_: int) -> None:
        """Delete what is kept no longer when a round is committed; on rank 0.

        That is one round, and the one before it, in case the group that had to delete it died.
        """
        newest = round_ - self.config.keep
        for old in range(max(0, newest - 1), newest + 1) if not self.peers.rank else ():
            keys = [entry.key for folder in (OFFERS, CHECKPOINTS)
                    for entry in self.store.list_named(folder, step_name(old))]
            keys += [entry.key for entry in self.store.list(f"{FOLDER}/{old:08d}")]
            for key in sorted(keys, key=lambda key: not key.endswith("manifest.json")):
                self.store.delete(key)


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
