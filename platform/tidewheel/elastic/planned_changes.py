"""Plan changes of size: the members of a generation leave at a step boundary, and the next has more or fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidewheel.elastic.generation import Generation, Outbox, Worker
from tidewheel.elastic.messages import GoOn, Stop
from tidewheel.elastic.policy import Move, Resizer, View


class PlannedChanges:
    """Asks the members of a generation to leave, and calls it off.

    Args:
        resizer: decides on growth and drains.
        outbox: receives messages and events.
        workers: all workers by name; the membership's own mapping.
    """

    def __init__(self, resizer: Resizer, outbox: Outbox, workers: Mapping[str, Worker]) -> None:
        self.is_last = False
        """The run ends with the present generation, as requested."""
        self._resizer = resizer
        self._outbox = outbox
        self._workers = workers

    def consider(self, generation: Generation | None, usable: Sequence[Worker], now: float,
                 remaining_seconds: float) -> None:
        """Ask the members to leave if a change is due, or call that off.

        Args:
            generation: a generation that runs.
            usable: the workers that can take a rank and keep it.
            now: monotonic seconds.
            remaining_seconds: time until the run is over, at the current speed.
        """
        assert generation is not None
        if self.is_last:
            if generation.step and generation.planned != "end":
                generation.planned = "end"
                self._outbox.send_all(generation.members, Stop(generation.number, save=True))
            return
        workers = self._workers
        leaving = [name for name in generation.members if name in workers and workers[name].leaving]
        decision = self._resizer.decide(View(
            time=now, size=len(generation.members), slots=len(usable), leaving=len(leaving),
            stepped=generation.step > 0, asked=bool(generation.planned), remaining_seconds=remaining_seconds))
        if decision.move is Move.ASK:
            generation.planned = decision.reason
            self._outbox.event("resize_asked", {"generation": generation.number, "to": decision.size,
                                                "reason": decision.reason})
            self._outbox.send_all(generation.members, Stop(generation.number))
        elif decision.move is Move.CALL_OFF:
            generation.planned = ""
            self._outbox.event("resize_called_off", {"generation": generation.number, "reason": decision.reason})
            self._outbox.send_all(generation.members, GoOn(generation.number))

    def announce(self, ended: Generation | None, generation: Generation) -> None:
        """Record that a change was made, if `generation` follows one that ended for it."""
        if ended is not None and ended.planned and not ended.lost:
            self._outbox.event("resize", {"generation": ended.number, "from": len(ended.members),
                                          "to": len(generation.members), "reason": ended.planned, "step": ended.step})
