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

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tidewheel import storage
from tidewheel.checkpoint.peers import Peers
from tidewheel.errors import CheckpointError, ConfigError, StorageError
from tidewheel.outer.background import Background
from tidewheel.outer.decisions import Decision
from tidewheel.outer.files import check_model
from tidewheel.outer.fragment import Fragment, Progress, fragments_of
from tidewheel.outer.meeting import agree, members_of
from tidewheel.train import checks
from tidewheel.train.outer_exchange import OuterExchange
from tidewheel.train.storage_wait import StorageWait, limit_of

if TYPE_CHECKING:
    from tidewheel.train.training import Training

logger = logging.getLogger(__name__)

FIRST_POLL_SECONDS = 0.05
POLL_SECONDS = 2.0
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
        outer = config.outer
        assert outer is not None
        self._config, self._steps = outer, config.steps
        self._model, self._collectives = training.model, training.collectives
        self._control, self._leads, self._limit = training.runtime.control, training.leads, training.runtime.limit
        peers = Peers()
        wait = StorageWait(limit_of(config), self._control.event)
        store = storage.store(outer.store)
        identity = checks.identity(config, training.source)
        weights = dict(training.optimizer.named)
        check_model(weights, [name for name, _ in training.model.named_buffers()])
        peers.from_first(lambda: wait(lambda: agree(store, outer, identity, config.run_uri)))
        self._fragments = []
        for index, names in enumerate(fragments_of(list(weights), outer.fragments)):
            if not names:
                raise ConfigError(f"outer.fragments {outer.fragments} is more than the model has layers",
                                  where="outer.fragments", fix="give at most as many as there are layers")
            folder = store if outer.fragments == 1 else store.child(f"fragment_{index:02d}")
            named = [(name, weights[name]) for name in names]
            self._fragments.append(Fragment(folder, named, outer, peers, wait, identity))
        self._longest_pause = min(POLL_SECONDS, config.guards.collective_timeout_seconds / 4)
        self._background = Background(self._limit)
        self._wait_began: float | None = None
        self._figures: dict[str, float] = {}

    # -- begin -------------------------------------------------------------------------------------
    def restore(self, saved: list[dict[str, Any]]) -> None:
        for fragment, progress in zip(self._fragments, saved):
            fragment.progress = Progress(**progress)

    def begin(self, step: int) -> None:
        for fragment in self._fragments:
            fragment.continue_with(fragment.progress)
            if fragment.replay is not None:
                continue  # its outcome comes after the same step as before
            newest = fragment.newest()
            if newest < 0:
                fragment.found()
                newest = 0
            if fragment.progress.round < 0 or (step < self._steps and self._is_behind(fragment, newest)):
                self._take(fragment, step, newest, joins=True)
            else:
                self._announce(fragment, step)

    def _is_behind(self, fragment: Fragment, newest: int) -> bool:
        """Return whether other groups have gone on without this one, so that its weights no longer serve.

        They serve up to the steps that this group has sent in the next round, however far the others are: the outcome
        that follows includes these steps, which would count twice if they were done again from it.
        """
        following = fragment.progress.round + 1
        return newest >= following and self._config.group not in members_of(fragment.decision(following))

    # -- rounds ------------------------------------------------------------------------------------
    def is_due(self, step: int) -> bool:
        return any(self._is_due(fragment, step) for fragment in self._fragments)

    def _is_due(self, fragment: Fragment, step: int) -> bool:
        """Return whether a fragment publishes its outer gradient or takes an outcome after this step."""
        progress = fragment.progress
        ends = step >= self._steps
        if fragment.replay is not None:
            return step >= fragment.replay["sent" if self._sends(fragment) else "step"]
        if self._sends(fragment):
            return step >= progress.due or (ends and step > progress.covered)
        return ends or step >= progress.sent + self._config.overlap

    @staticmethod
    def _sends(fragment: Fragment) -> bool:
        """Return whether a fragment publishes an outer gradient before it takes the next outcome."""
        replay = fragment.replay
        return fragment.progress.sent < 0 and (replay is None or replay["sent"] >= 0)

    def meet(self, step: int, ask: Callable[[], int]) -> int:
        self._background.join()
        fragment = next(fragment for fragment in self._fragments if self._is_due(fragment, step))
        if self._sends(fragment):
            if not self._send(fragment, step):
                self._take(fragment, step, fragment.newest())
        elif fragment.replay is not None:
            self._take(fragment, step, fragment.replay["round"])
        else:
            return self._end_round(fragment, step, ask)
        return 0

    def _send(self, fragment: Fragment, step: int) -> bool:
        """Publish the outer gradient; return False if this group was left out, or the gradient is not finite."""
        round_ = fragment.progress.round + 1
        published = fragment.replay is not None
        if not published:
            newest = fragment.newest()
            if self._is_behind(fragment, newest):
                self._event("outer_left_out", step=step, round=round_)
                return False
            published = newest >= round_ or fragment.from_first(lambda: fragment.meetings.has_offered(round_))
        if published:  # this group did so before a failure
            fragment.offer_again()
        else:
            fragment.load(round_ - 1)
            gradient = fragment.gradient()
            finite = torch.stack([part.isfinite().all() for part in gradient]).all()
            if self._sum(not finite):
                self._event("outer_not_finite", step=step, round=round_)
                return False
            fragment.offer(gradient)
            self._background.start(fragment.publish)
        fragment.progress = replace(fragment.progress, sent=step)
        return True

    def _end_round(self, fragment: Fragment, step: int, ask: Callable[[], int]) -> int:
        """Wait for the decision of a round and take the outcome; return requests that interrupted the wait."""
        began = time.monotonic()
        round_ = fragment.progress.round + 1
        asked, decision = self._decided(fragment, round_, ask)
        if decision is None:
            return asked
        waited = time.monotonic() - began
        self._wait_began = None
        newest = fragment.newest()  # a later one if this group was away and the others have gone on
        members = sorted(members_of(decision))
        member = self._config.group in members and newest == round_
        wins = member and decision["by"] == self._config.group
        if member and fragment.loaded == round_ - 1:  # else this group stopped after it had sent, and `_take` loads it
            if wins:
                fragment.commit(round_ - 1)  # the group that had to do so may have died
            fragment.advance(decision)
        self._take(fragment, step, newest, sent=fragment.progress.sent if member else -1)
        if wins:
            self._background.start(partial(fragment.commit, round_))
        if step >= self._steps:
            self._background.join()
        traffic = fragment.traffic()
        self._figures = {
            "outer_round": fragment.progress.round, "outer_members": len(members) if member else 0,
            "outer_sent_bytes": traffic["sent"], "outer_read_bytes": int(self._sum(traffic["read"])),
            "outer_state_bytes": traffic["state"], "outer_wait_seconds": waited,
            "outer_seconds": time.monotonic() - began}
        self._event("outer_round" if member else "outer_left_out", step=step, round=fragment.progress.round,
                    members=members, fragment=self._fragments.index(fragment), wait_seconds=round(waited, 3))
        return 0

    def _decided(self, fragment: Fragment, round_: int, ask: Callable[[], int]) -> tuple[int, Decision | None]:
        """Wait for the decision of a round, and make it if this group can; return (requests, decision)."""
        last = fragment.decision(round_ - 1)
        reported = self._wait_began is not None
        began = time.monotonic() if self._wait_began is None else self._wait_began
        self._wait_began = began

        def look() -> Decision | None:
            patient = time.monotonic() - began < self._config.patience_seconds
            return fragment.meetings.look(round_, last, patient=patient)

        pause = FIRST_POLL_SECONDS
        while (decision := fragment.from_first(look)) is None:
            if not reported:
                reported = True
                self._event("outer_waits", round=round_, missing=fragment.from_first(
                    lambda: fragment.meetings.missing(round_, last)))
            asked = self._collectives.from_first(ask() if self._leads else 0)
            if asked:
                return asked, None
            self._limit.pause(min(pause, self._longest_pause))
            pause *= 1.5
        return 0, decision

    def _take(self, fragment: Fragment, step: int, round_: int, *, sent: int = -1, joins: bool = False) -> None:
        """Go on from the outer state of a round.

        Args:
            fragment: whose state it is.
            step: the last step done.
            round_: the round.
            sent: step after which the outer gradient was published that the outcome includes; -1: it includes none.
            joins: the group comes in between two rounds, so the next one ends a whole interval later.
        """
        number = fragment.progress.takes
        record = {"step": step, "round": round_, "joins": joins, "sent": sent}
        noted = fragment.from_first(lambda: fragment.takes.decide(number, record))
        if noted["step"] != step:
            raise StorageError(f"another process of group {self._config.group} has gone on after step {noted['step']}",
                               where=fragment.store.uri, fix="start each group once, with outer.group of its own")
        sent = noted["sent"]
        round_ = self._load(fragment, step, noted["round"])
        fragment.set_weights(self._config.merge if 0 <= sent < step else 0.0)
        self._model.refresh()
        if sent < 0:  # the outer gradient that left the residuals does not count
            fragment.clear_residuals()
        logger.info("goes on from the outer state of round %d after step %d", round_, step)
        covered = sent if sent >= 0 else step
        interval = self._config.offset(self._fragments.index(fragment)) if noted["joins"] else self._config.every
        fragment.continue_with(Progress(round_, number + 1, covered, covered + interval))
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

    def _announce(self, fragment: Fragment, step: int) -> None:
        """Tell the others whether this group takes part in the next round."""
        next_round = fragment.progress.round + 1
        finished = step >= self._steps and step <= fragment.progress.covered  # else a last round covers the last steps
        tell = fragment.meetings.leave if finished else fragment.meetings.announce
        fragment.from_first(lambda: tell(next_round))

    # -- what the loop reads -------------------------------------------------------------------------
    def tensors(self) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        for fragment in self._fragments:
            held |= fragment.residuals
        return held

    def state(self) -> list[dict[str, Any]]:
        self._background.join()  # a checkpoint that says that an outer gradient is published can rely on it
        return [asdict(fragment.progress) for fragment in self._fragments]

    def base(self) -> int:
        return sum(fragment.progress.round for fragment in self._fragments)

    def figures(self) -> dict[str, float]:
        figures = self._figures
        self._figures = {}
        return figures

    def _sum(self, value: float) -> float:
        """Return the sum of a value over all ranks."""
        total = self._collectives.sum(torch.tensor([value], dtype=torch.float64))
        return float(self._collectives.to_host(total).item())

    def _event(self, kind: str, **detail: Any) -> None:
        if self._leads:
            self._control.event(kind, **detail)
