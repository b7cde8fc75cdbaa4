"""Measure the parts of a driver's start, from the call of `fit` to the first step."""

from __future__ import annotations

from typing import Any

CALLED, OWNED, COORDINATOR, CONTROLLER, WORKERS, FORMED, RESTORED, STEPPED = (
    "called", "owned", "coordinator", "controller", "workers", "formed", "restored", "stepped")
PARTS = {
    OWNED: "ownership",
    COORDINATOR: "coordinator",
    CONTROLLER: "controller",
    WORKERS: "processes",
    FORMED: "imports",
    RESTORED: "state",
    STEPPED: "first_step",
}
"""What the time that ends with each moment was spent on, in order.

`ownership` is for imports and the previous driver's lease. In `coordinator` and `controller` their processes start, in
`processes` those of the workers. In `imports` the workers import torch, test their node, connect, and get a rank. In
`state` they meet, build the model and load its state."""


class StartTimes:
    """Collects the moments of a start. Only the first report of a moment counts, except that of a restored state: the
    first generation may fail.

    Args:
        called: Unix time of the call that started the run; 0.0 if it is not known.
        owned: Unix time since which the run is this driver's.
    """

    def __init__(self, called: float, owned: float) -> None:
        self._times = {CALLED: called, OWNED: owned} if called else {}
        self.complete = not called
        """Whether the first step has been done, or nothing is measured."""

    def reach(self, moment: str, unix: float) -> dict[str, Any] | None:
        """Note a moment. Return the detail of the event `started` with the first step, else None.

        Args:
            moment: which, one of `PARTS`.
            unix: when.
        """
        if self.complete:
            return None
        if moment == RESTORED or moment not in self._times:
            self._times[moment] = unix
        if moment != STEPPED:
            return None
        self.complete = True
        return self._detail()

    def _detail(self) -> dict[str, Any]:
        """Return the seconds of each part; those before a moment that nobody reported count towards the next part."""
        before = self._times[CALLED]
        parts: dict[str, float] = {}
        for moment, part in PARTS.items():
            at = max(before, self._times.get(moment, before))  # clocks of two machines may differ a little
            parts[part] = round(at - before, 3)
            before = at
        return {"seconds": round(before - self._times[CALLED], 3), "parts": parts}
