"""Meet the other groups of a DiLoCo run over storage: offer, decide, take. All ranks of a group act together.

A round of a fragment has these steps, each durable before the next:

1. Each group publishes its outer gradient (`offers/`).
2. The first group that sees all it expects, or has no more patience, proposes the members; one proposal wins
   (`decisions/`).
3. The outcome is a pure function of the last outer state and the members' outer gradients in the order of groups, so
   every group computes it. The one whose proposal has won also commits it (`checkpoints/`), any other can.
4. A group notes after which of its steps it takes which outcome (`takes/`), and takes it.

A group that repeats steps after a failure finds its own notes and takes the same outcomes after the same steps. A
group that was left out takes the newest.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tidewheel import storage
from tidewheel.checkpoint.manifest import step_name
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.staging import local
from tidewheel.errors import CheckpointError, ConfigError, StorageError
from tidewheel.outer.background import Background
from tidewheel.outer.decisions import Decision
from tidewheel.outer.fragment import Fragment, Progress, fragments_of
from tidewheel.outer.meeting import members_of, settings_differ
from tidewheel.storage import Store
from tidewheel.train import checks
from tidewheel.train.outer_exchange import OuterExchange
from tidewheel.train.storage_wait import StorageWait, limit_of

if TYPE_CHECKING:
    from tidewheel.train.training import Training

logger = logging.getLogger(__name__)

SETTINGS = "outer.json"
"""What all groups share, written by the first."""
FIRST_POLL_SECONDS, POLL_SECONDS = 0.05, 2.0
"""Between two looks for the other groups: at first, and at most. Each pause is 1.5 times the one before."""


class Exchange(OuterExchange):
    """The exchange of one worker.

    Args:
        training: this worker's share of the run; it is not kept.

    Raises:
        ConfigError: the model cannot be exchanged, or other groups of this store have other settings.
    """

    def __init__(self, training: Training) -> None:
        config = training.config
        assert config.outer is not None
        self._config, self._steps = config.outer, config.steps
        self._model, self._collectives = training.model, training.collectives
        self._control, self._leads, self._limit = training.runtime.control, training.leads, training.runtime.limit
        self._peers = Peers()
        self._wait = StorageWait(limit_of(config), self._control.event)
        store = storage.store(config.outer.store)
        identity = checks.identity(config, training.source)
        named = list(training.optimizer.named)
        _check_model(named, [name for name, _ in training.model.named_buffers()])
        run = config.run_uri
        self._peers.from_first(lambda: self._wait(lambda: self._agree(store, identity, run)))
        parts = fragments_of([name for name, _ in named], config.outer.fragments)
        self._fragments = []
        for index, names in enumerate(parts):
            if not names:
                raise ConfigError(f"outer.fragments {config.outer.fragments} is more than the model has layers",
                                  where="outer.fragments", fix="give at most as many as there are layers")
            folder = store if len(parts) == 1 else store.child(f"fragment_{index:02d}")
            weights = [(name, weight) for name, weight in named if name in set(names)]
            self._fragments.append(Fragment(folder, weights, config.outer, self._peers, self._wait, identity))
        self._longest_pause = min(POLL_SECONDS, config.guards.collective_timeout_seconds / 4)
        self._background = Background(self._limit)
        self._saved: list[dict[str, Any]] | None = []  # until the exchange begins; [] for a run without groups before
        self._wait_began: float | None = None
        self._figures: dict[str, float] = {}

    def _agree(self, store: Store, identity: dict[str, Any], run: str) -> None:
        """Write what all groups share, or compare it with what the first group has written; on rank 0."""
        outer = self._config
        shared = {name: getattr(outer, name) for name in ("groups", "every", "learning_rate", "momentum", "quantise",
                                                          "fragments", "overlap", "merge", "keep")}
        shared |= {name: identity[name] for name in ("model", "global_sequences", "ramp", "data_seed", "shards",
                                                     "vocabulary_size")}
        if not store.exists(SETTINGS):
            store.write_json(SETTINGS, shared)
        if different := settings_differ(store.read_json(SETTINGS), json.loads(json.dumps(shared))):
            raise ConfigError(f"the groups that meet here have other settings: {'; '.join(different)}"[:500],
                              where=store.at(SETTINGS),
                              fix="give all groups the same, or another outer.store for another run")
        member = f"groups/{outer.group:04d}.json"
        if not store.exists(member):
            store.write_json(member, {"run": run})
        if (other := store.read_json(member)["run"]) != run:
            raise ConfigError(f"group {outer.group} of the groups that meet here is the run {other}",
                              where=store.at(member), fix="give each run an outer.group of its own, continue that run, "
                              "or give another outer.store")

    # -- begin -------------------------------------------------------------------------------------
    def restore(self, saved: list[dict[str, Any]]) -> None:
        self._saved = saved

    def begin(self, step: int, settle: Callable[[], None]) -> None:
        saved, self._saved = self._saved, None
        for index, fragment in enumerate(self._fragments):
            known = saved is not None and index < len(saved)
            fragment.progress = Progress(**saved[index]) if saved is not None and known else Progress()
            fragment.offered = None
            self._look_for_replay(fragment)
            if fragment.replay is not None:
                continue  # its outcome comes after the same step as before
            newest = fragment.newest()
            if newest < 0:
                fragment.found()
                newest = 0
            if not known or (step < self._steps and self._is_behind(fragment, newest)):
                self._take(fragment, step, newest, settle, joins=True)
                continue
            if newest == fragment.progress.round:
                fragment.load(newest)
            self._announce(fragment, step)

    def _is_behind(self, fragment: Fragment, newest: int) -> bool:
        """Return whether other groups have gone on without this one, so that its weights no longer serve.

        They serve up to the steps that this group has sent in the next round, however far the others are: the outcome
        that follows includes these steps, which would count twice if they were done again from it.
        """
        own = fragment.progress.round
        if newest <= own:
            return False
        decision = fragment.decision(own + 1)
        return decision is None or self._config.group not in members_of(decision)

    def _look_for_replay(self, fragment: Fragment) -> None:
        number = fragment.progress.takes
        record = self._from_first(lambda: fragment.takes.get(number))
        fragment.replay = record

    # -- rounds ------------------------------------------------------------------------------------
    def is_due(self, step: int) -> bool:
        return self._due(step) is not None

    def _due(self, step: int) -> Fragment | None:
        """Return the first fragment that publishes its outer gradient or takes an outcome after this step."""
        for fragment in self._fragments:
            progress, ends = fragment.progress, step >= self._steps
            if fragment.replay is not None:
                due = step >= int(fragment.replay["step"]) or self._rounds_again(fragment, step)
            elif progress.sent >= 0:
                due = ends or step >= progress.sent + self._config.overlap
            else:
                due = step >= progress.due or (ends and step > progress.covered)
            if due:
                return fragment
        return None

    def meet(self, step: int, ask: Callable[[], int], settle: Callable[[], None]) -> int:
        self._background.join()
        fragment = self._due(step)
        assert fragment is not None, "is_due says when"
        if fragment.replay is not None and self._rounds_again(fragment, step):
            self._round_again(fragment, step, settle)
        elif fragment.replay is not None:
            self._take(fragment, step, int(fragment.replay["round"]), settle)
        elif fragment.progress.sent >= 0:
            return self._end_round(fragment, step, ask, settle)
        elif not self._send(fragment, step, settle):
            self._take(fragment, step, fragment.newest(), settle)
        return 0

    def _rounds_again(self, fragment: Fragment, step: int) -> bool:
        """Return whether this group published an outer gradient after this step before a failure, with residuals."""
        replay = fragment.replay
        return (replay is not None and bool(fragment.residuals) and fragment.progress.sent < 0
                and 0 <= int(replay["sent"]) <= step)

    def _round_again(self, fragment: Fragment, step: int, settle: Callable[[], None]) -> None:
        """Set the residuals as the outer gradient left them that this group published before a failure."""
        if fragment.residuals:
            settle()
            try:
                fragment.load(fragment.progress.round)
                fragment.encode(fragment.gradient())
            except CheckpointError:  # the groups keep that outer state no longer
                fragment.clear_residuals()
        fragment.progress = replace(fragment.progress, sent=step)

    def _send(self, fragment: Fragment, step: int, settle: Callable[[], None]) -> bool:
        """Publish the outer gradient; return False if this group was left out, or the gradient is not finite."""
        newest = fragment.newest()
        if self._is_behind(fragment, newest):
            self._event("outer_left_out", step=step, round=fragment.progress.round + 1)
            return False
        if newest > fragment.progress.round or self._from_first(
                lambda: fragment.meetings.has_offered(fragment.progress.round + 1)):
            self._round_again(fragment, step, settle)
            return True  # this group did so before a failure
        fragment.load(fragment.progress.round)
        gradient = fragment.gradient()
        finite = torch.stack([part.isfinite().all() for part in gradient]).all()
        counts = self._collectives.sum(torch.tensor([not finite], dtype=torch.float64))
        if self._collectives.to_host(counts).item():
            self._event("outer_not_finite", step=step, round=fragment.progress.round + 1)
            return False
        if fragment.residuals:
            settle()
        fragment.prepare(gradient)
        fragment.progress = replace(fragment.progress, sent=step)
        self._background.start(fragment.publish)
        return True

    def _end_round(self, fragment: Fragment, step: int, ask: Callable[[], int], settle: Callable[[], None]) -> int:
        """Wait for the decision of a round and take the outcome; return requests that interrupted the wait."""
        began = time.monotonic()
        round_ = fragment.progress.round + 1
        asked, decision = self._decided(fragment, round_, ask)
        if decision is None:
            return asked
        waited = time.monotonic() - began
        self._wait_began = None
        newest = fragment.newest()  # a later one if this group was away and the others have gone on
        member = self._config.group in members_of(decision) and newest == round_
        if member:
            self._advance(fragment, decision)
            self._take(fragment, step, round_, settle)
            if int(decision["by"]) == self._config.group:
                self._background.start(partial(self._commit, fragment, decision))
        else:
            self._take(fragment, step, newest, settle)
        if step >= self._steps:
            self._background.join()
        sent, read, state = (int(value) for value in self._bytes(fragment))
        members = sorted(members_of(decision))
        self._figures = {"outer_round": fragment.progress.round, "outer_members": len(members) if member else 0,
                         "outer_sent_bytes": sent, "outer_read_bytes": read, "outer_state_bytes": state,
                         "outer_wait_seconds": waited, "outer_seconds": time.monotonic() - began}
        self._event("outer_round" if member else "outer_left_out", step=step, round=fragment.progress.round,
                    members=members, fragment=self._fragments.index(fragment), wait_seconds=round(waited, 3))
        return 0

    def _bytes(self, fragment: Fragment) -> list[float]:
        """Return what a fragment has sent, read and committed since the last call, over all ranks."""
        counts = [fragment.sent_bytes, fragment.read_bytes, fragment.state_bytes]
        since = [count - before for count, before in zip(counts, fragment.reported)]
        fragment.reported = counts
        read = torch.tensor([since[1]], dtype=torch.float64)
        since[1] = int(self._collectives.to_host(self._collectives.sum(read)).item())
        return [float(value) for value in since]

    def _decided(self, fragment: Fragment, round_: int, ask: Callable[[], int]) -> tuple[int, Decision | None]:
        """Wait for the decision of a round, and make it if this group can; return (requests, decision)."""
        last = fragment.decision(round_ - 1)
        reported = self._wait_began is not None
        if self._wait_began is None:
            self._wait_began = time.monotonic()
        pause = FIRST_POLL_SECONDS
        while True:
            patient = time.monotonic() - self._wait_began < self._config.patience_seconds

            def look(patient: bool = patient) -> Decision | None:
                return fragment.meetings.look(round_, last, patient=patient)

            decision = self._from_first(look)
            if decision is not None:
                return 0, decision
            if not reported:
                reported = True
                self._event("outer_waits", round=round_, missing=self._from_first(
                    lambda: fragment.meetings.missing(round_, last)))
            asked = self._collectives.from_first(ask() if self._leads else 0)
            if asked:
                return asked, None
            self._limit.pause(min(pause, self._longest_pause))
            pause *= 1.5

    def _advance(self, fragment: Fragment, decision: Decision) -> None:
        """Compute the outcome of a round. The group whose proposal has won sees that the state before is committed."""
        round_ = int(decision["round"])
        if fragment.loaded != round_ - 1:  # this group stopped after it had published its outer gradient
            fragment.load(round_)
            return
        own = int(decision["by"]) == self._config.group
        if own and not fragment.states.exists(step_name(round_ - 1)):  # the group that had to do so has died
            previous = fragment.decision(round_ - 1)
            fragment.commit(round_ - 1, sorted(members_of(previous)) if previous else [])
        fragment.advance(decision, fragment.offered)

    def _take(self, fragment: Fragment, step: int, round_: int, settle: Callable[[], None], *,
              joins: bool = False) -> None:
        """Go on from the outer state of a round.

        Args:
            fragment: whose state it is.
            step: the last step done.
            round_: the round.
            settle: waits until the weights may change.
            joins: the group comes in between two rounds, so the next one ends a whole interval later.
        """
        progress = fragment.progress
        follows = round_ == progress.round + 1 and fragment.loaded == round_
        record = {"step": step, "round": round_, "joins": joins, "sent": progress.sent if follows else -1}
        noted = self._from_first(lambda: fragment.takes.decide(progress.takes, record))
        if int(noted["step"]) != step:
            raise StorageError(f"another process of group {self._config.group} has gone on after step {noted['step']}",
                               where=fragment.store.uri, fix="start each group once, with outer.group of its own")
        round_, sent = self._load(fragment, step, int(noted["round"])), int(noted["sent"])
        settle()
        merge = self._config.merge if 0 <= sent < step else 0.0
        with torch.no_grad():
            for (name, _), weight in zip(fragment.named, fragment.weights):
                base = local(fragment.base[name])
                weight.copy_(base if not merge else base + (weight - base) * merge)
        self._model.refresh()
        if sent < 0:  # the outer gradient that left the residuals does not count
            fragment.clear_residuals()
        logger.info("goes on from the outer state of round %d after step %d", round_, step)
        last = sent if sent >= 0 else step
        interval = self._config.offset(self._fragments.index(fragment)) if noted["joins"] else self._config.every
        fragment.progress = Progress(round_, progress.takes + 1, last, last + interval)
        fragment.offered = None
        self._look_for_replay(fragment)
        self._announce(fragment, step)

    def _load(self, fragment: Fragment, step: int, round_: int) -> int:
        """Set the outer state to that of a round, or of the newest if that one is no longer kept; return which."""
        try:
            fragment.load(round_)
        except CheckpointError:
            newest = fragment.newest()
            if newest <= round_ + self._config.keep - 1:
                raise
            self._event("outer_history_gone", step=step, round=round_, newest=newest)
            fragment.load(newest)
            return newest
        return round_

    def _commit(self, fragment: Fragment, decision: Decision) -> None:
        """Commit the outcome of a round, and delete what is kept no longer."""
        round_ = int(decision["round"])
        fragment.commit(round_, sorted(members_of(decision)))
        self._from_first(lambda: fragment.clean_up(round_))

    def _announce(self, fragment: Fragment, step: int) -> None:
        """Tell the others whether this group takes part in the next round."""
        next_round = fragment.progress.round + 1
        finished = step >= self._steps and step <= fragment.progress.covered  # else a last round covers the last steps
        tell = fragment.meetings.leave if finished else fragment.meetings.announce
        self._from_first(lambda: tell(next_round))

    # -- what the loop reads -------------------------------------------------------------------------
    def tensors(self) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        for fragment in self._fragments:
            held |= {f"residual/{name}": residual for name, residual in fragment.residuals.items()}
        return held

    def state(self) -> list[dict[str, Any]]:
        if self._saved is not None:
            return self._saved
        self._background.join()  # a checkpoint that says that an outer gradient is published can rely on it
        return [asdict(fragment.progress) for fragment in self._fragments]

    def base(self) -> int:
        return sum(fragment.progress.round for fragment in self._fragments)

    def figures(self) -> dict[str, float]:
        figures, self._figures = self._figures, {}
        return figures

    def _from_first(self, request: Callable[[], Any]) -> Any:
        """Return the answer to a request of rank 0 on all ranks; it is repeated while the store is unavailable."""
        return self._peers.from_first(lambda: self._wait(request))

    def _event(self, kind: str, **detail: Any) -> None:
        if self._leads:
            self._control.event(kind, **detail)


def _check_model(named: list[tuple[str, torch.Tensor]], buffers: list[str]) -> None:
    """Raise ConfigError unless the outer step can be taken on the parts of weights that this rank has.

    Args:
        named: the weights.
        buffers: names of what a checkpoint holds besides.
    """
    if buffers:
        raise ConfigError(f"the model keeps {buffers[0]} besides its weights, which groups would not share",
                          where="outer", fix="train a dense model, or a mixture of experts that balances by its loss")
    for name, weight in named:
        placements = weight.placements if isinstance(weight, DTensor) else ()
        if any(not isinstance(place, Replicate) and place != Shard(0) for place in placements):
            raise ConfigError(f"{name} is placed as {placements}, but outer gradients are sharded by rows",
                              where="outer", fix="choose parallel.data zero2")
