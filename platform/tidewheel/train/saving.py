"""Saves of a run: when, what goes along with the tensors, and what a planned change waits for."""

from __future__ import annotations

from typing import Any

import torch

from tidewheel.parts import as_json
from tidewheel.train import checks
from tidewheel.train.guards.policy import Guard
from tidewheel.train.save_schedule import SaveSchedule
from tidewheel.train.step import SAVE, STOP
from tidewheel.train.training import Training


class Saving:
    """One worker's side of it.

    Args:
        guard: its counts are part of a checkpoint.
    """

    def __init__(self, training: Training, guard: Guard) -> None:
        self._training, self._guard, self._checkpoints = training, guard, training.runtime.checkpoints
        config = training.config
        self._constant: dict[str, Any] = {
            "recipe_hash": config.recipe_hash(), "identity": checks.identity(config, training.source),
            "seed": config.seed, "schedule": {**as_json(config.schedule), "steps": config.steps}}
        self._schedule: SaveSchedule | None = None  # on rank 0
        self._uncommitted = -1  # step of the save that was begun and not yet seen to be committed; on rank 0

    def open(self) -> None:
        """Find out when to save; run.json is there."""
        training, record = self._training, self._training.record
        if training.leads:
            self._schedule = training.retry(lambda: SaveSchedule(
                training.config.checkpoint, started=record.started(), failures=record.failures()))

    def taken_up(self, extra: dict[str, Any]) -> None:
        """The run goes on from the checkpoint with this `extra`."""
        in_memory = extra.get("tier") == "memory"
        self._training.progress.saved = -1 if in_memory else int(extra["step"])
        if self._schedule is not None and in_memory:
            self._schedule.owed = bool(extra.get("save_owed"))

    def ask(self, step: int) -> int:
        """Return what all ranks shall do after this step, any of `STOP` and `SAVE`; on rank 0."""
        control, schedule = self._training.runtime.control, self._schedule
        stop = control.poll()
        due = schedule is not None and schedule.due(step, self._checkpoints.saves())
        if schedule is not None and due and stop:  # who makes way does not wait for it: the next generation saves
            schedule.owed = True
        return STOP * stop | SAVE * ((due and not stop) or control.save_wanted())

    def settle(self) -> None:
        """Before an update: what is to be kept of the values there are has been copied."""
        training = self._training
        training.timeline.spent(training.spent_on(training.progress.step + 1))
        self._checkpoints.settle()
        training.timeline.spent("save_stall")

    def save(self, step: int) -> None:
        """Begin to save, unless that was done after this step already."""
        training = self._training
        if training.progress.saved == step:
            return
        training.watch.mark(step, "save")
        training.reader.settle()  # what was learnt from a damaged shard is not kept
        if self._schedule is not None:
            self._schedule.began()
        self._checkpoints.save(step, training.state(), self._extra(step))
        self._uncommitted = training.progress.saved = step
        seconds = training.timeline.spent("save_stall")
        training.event("save", step=step, stall_seconds=round(seconds, 4))

    def save_for_good(self) -> None:
        """Save for the last time: the run is not over before it is committed, or has failed too often."""
        training = self._training
        while True:
            self.save(training.progress.step)
            self._checkpoints.wait()
            training.timeline.spent("save_stall")
            if not self._checkpoints.saves().failed:
                return
            training.progress.saved = -1
            training.runtime.limit.pause(training.config.checkpoint.retry_seconds)

    def committed(self) -> int:
        """Return the step of a save that has been committed since the last call, -1 for none; on rank 0."""
        step, saves = self._uncommitted, self._checkpoints.saves()
        if step < 0 or saves.busy:
            return -1
        self._uncommitted = -1
        return -1 if saves.failed else step

    def keep_if_wanted(self, step: int) -> None:
        """Keep the state where a recovery finds it, if that is wanted after this step."""
        training = self._training
        if not self._checkpoints.keeps(step):
            return
        training.watch.mark(step, "keep")
        training.reader.settle()  # as for a save; it waits only when a shard was just opened
        owed = self._schedule is not None and (self._schedule.owed or self._checkpoints.saves().busy)
        self._checkpoints.keep(step, training.state(), {**self._extra(step), "save_owed": owed})
        training.timeline.spent("save_stall")

    def is_safe(self, step: int) -> bool:
        """Return whether all that was kept of `step` outlives any one node."""
        unsafe = torch.tensor([float(not self._checkpoints.is_safe(step))], dtype=torch.float64)
        return not self._training.collectives.sum(unsafe).item()

    def make_way(self, step: int) -> None:
        """A planned resize or drain: commit, and end this generation.

        Raises:
            Preempted: the ranks part.
        """
        training = self._training
        training.watch.mark(step, "hold")
        if training.progress.saved == step:
            self._checkpoints.wait()
        else:  # what is under way is older than what memory holds: the next generation begins it anew
            self._checkpoints.let_go()
        training.timeline.spent("save_stall")
        if training.progress.saved == step and self._checkpoints.saves().failed:
            training.progress.saved = -1
            return  # nothing is given up that is not kept: the wish is heard again at the next step
        training.runtime.control.hold(step)
        training.timeline.spent("idle")

    def _extra(self, step: int) -> dict[str, Any]:
        """Return what goes with the tensors of a checkpoint."""
        training, progress = self._training, self._training.progress
        return {
            "step": step, "position": training.positions.end(step), "tokens": progress.tokens,
            "loss": progress.loss, "guard": self._guard.state(),
            "validation_loss": progress.validation_loss if progress.validated == step else None,
            "passed_over": [list(window) for window in training.positions.windows],
            "loss_scale": training.loss_scale.state() if training.loss_scale is not None else None, **self._constant,
            "unwritten": training.record.unwritten()}
