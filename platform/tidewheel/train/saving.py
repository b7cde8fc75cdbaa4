"""Save a run: when to save, what goes with the tensors, and what a planned change waits for."""

from __future__ import annotations

from typing import Any

import torch

from tidewheel.parts import as_json
from tidewheel.train import checks
from tidewheel.train.continuing import Continuing
from tidewheel.train.guards.policy import Guard
from tidewheel.train.save_schedule import SaveSchedule
from tidewheel.train.step import CANNOT_KEEP, KEEP, SAVE, STOP
from tidewheel.train.training import Training


class Saving:
    """Saves of one worker; all ranks make the same calls.

    Args:
        training: this worker's share of the run.
        guard: its counts are part of a checkpoint.
    """

    def __init__(self, training: Training, guard: Guard) -> None:
        self._training, self._guard, self._checkpoints = training, guard, training.runtime.checkpoints
        config = training.config
        self.continuing = Continuing(config, training.source.manifest.sequence_length)
        self._constant: dict[str, Any] = {
            "recipe_hash": config.recipe_hash(), "identity": checks.identity(config, training.source),
            "seed": config.seed, "schedule": {**as_json(config.schedule), "steps": config.steps}}
        self._schedule: SaveSchedule | None = None  # on rank 0
        self._uncommitted = -1  # step of a save whose commit is not yet seen; on rank 0
        self._kept = -1  # step that was given to the memory tier last

    def open(self) -> None:
        """Read from the run's record when to save; run.json must exist."""
        training, record = self._training, self._training.record
        if training.leads:
            self._schedule = training.retry(lambda: SaveSchedule(
                training.config.checkpoint, started=record.started(), failures=record.failures()))

    def continue_from(self, extra: dict[str, Any]) -> None:
        """Continue from the checkpoint with this `extra`."""
        in_memory = extra.get("tier") in ("memory", "disk")  # and not in storage
        self._kept = -1
        self._training.progress.saved = -1 if in_memory else int(extra["step"])
        if self._schedule is not None and in_memory:
            self._schedule.owed = bool(extra.get("save_owed"))

    def ask(self, step: int) -> int:
        """Return this rank's part of what all ranks are asked to do after this step, see `StepResult.asked`."""
        cannot_keep = CANNOT_KEEP * (not self._checkpoints.may_keep())
        if not self._training.leads:
            return cannot_keep
        return cannot_keep | KEEP * self._checkpoints.keeps(step) | self.requests(step)

    def requests(self, step: int) -> int:
        """Return what the cluster and the schedule ask for after this step, any of `STOP` and `SAVE`; on rank 0."""
        control, schedule = self._training.runtime.control, self._schedule
        stop = control.poll()
        due = schedule is not None and self._is_due(step, schedule)
        if schedule is not None and due and stop:  # a preempted generation does not wait: the next one saves
            schedule.owed = True
        return STOP * stop | SAVE * ((due and not stop) or control.save_requested())

    def expects(self, step: int) -> bool:
        """Return whether something may be asked for after this step, as far as is known now; on rank 0.

        It changes nothing, so `ask` decides when the step comes.
        """
        control = self._training.runtime.control
        stop = control.poll()
        due = self._schedule is not None and self._is_due(step, self._schedule)
        return stop or due or control.save_requested() or self._checkpoints.keeps(step)

    def _is_due(self, step: int, schedule: SaveSchedule) -> bool:
        """Return whether to save after this step: as the interval says, and at the end of the stable phase."""
        return step == self.continuing.last_stable_step or schedule.due(step, self._checkpoints.saves())

    def settle(self) -> None:
        """Wait, before an update, until the copies of the current values are made."""
        training = self._training
        training.waits.end()
        training.timeline.spent(training.spent_on(training.progress.step + 1))
        self._checkpoints.settle()
        training.timeline.spent("save_stall")
        training.waits.begin()

    def save(self, step: int) -> None:
        """Start a save, unless this step is saved already."""
        training = self._training
        if training.progress.saved == step:
            return
        training.watch.mark(step, "save")
        training.reader.settle()  # never save what was trained on a damaged shard
        if self._schedule is not None:
            self._schedule.began()
        self._checkpoints.save(step, training.state(), self._extra(step))
        self._uncommitted = training.progress.saved = step
        seconds = training.timeline.spent("save_stall")
        training.event("save", step=step, stall_seconds=round(seconds, 4))

    def save_finished(self) -> None:
        """Save the finished run, and try again until the save is committed or has failed too often."""
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
        """Return the step of a save that was committed since the last call, -1 for none; called on rank 0."""
        step, saves = self._uncommitted, self._checkpoints.saves()
        if step < 0 or saves.busy:
            return -1
        self._uncommitted = -1
        return -1 if saves.failed else step

    def keep_if_due(self, step: int, asked: int) -> None:
        """Copy the state to the memory tier if that is due after this step and all ranks can do so.

        A planned stop also waits until they can: no save to storage is then needed.

        Args:
            step: the last step done.
            asked: see `StepResult.asked`.
        """
        if (asked & STOP and self._checkpoints.has_memory()) or (asked & KEEP and asked < CANNOT_KEEP):
            self.keep(step)
        elif asked & KEEP:
            self._training.progress.skipped_keeps += 1

    def keep(self, step: int) -> None:
        """Copy the state to the memory tier, unless it was copied after this step before. All ranks call it."""
        training = self._training
        if self._kept == step:
            return
        self._kept = step
        training.watch.mark(step, "keep")
        training.reader.settle()  # as for a save; waits only after a shard was opened
        owed = self._schedule is not None and (self._schedule.owed or self._checkpoints.saves().busy)
        self._checkpoints.keep(step, training.state(), {**self._extra(step), "save_owed": owed})
        training.timeline.spent("save_stall")

    def is_safe(self, step: int) -> bool:
        """Return whether the memory tier's copies of `step` survive the loss of any one node."""
        unsafe = torch.tensor([float(not self._checkpoints.is_safe(step))], dtype=torch.float64)
        collectives = self._training.collectives
        return not collectives.to_host(collectives.sum(unsafe)).item()

    def make_way(self, step: int) -> None:
        """Commit what is saved and end this generation, for a planned resize or drain.

        It returns if the save failed or the change was called off; the cluster asks again at the next step.

        Raises:
            Preempted: this generation ends.
        """
        training = self._training
        training.watch.mark(step, "hold")
        if training.progress.saved == step:
            self._checkpoints.wait()
        else:  # memory holds a newer step than the save in progress: the next generation saves again
            self._checkpoints.let_go()
        training.timeline.spent("save_stall")
        if training.progress.saved == step and self._checkpoints.saves().failed:
            training.progress.saved = -1
            return  # never give up a step that is not saved: the request comes again at the next step
        training.runtime.control.hold(step)
        training.timeline.spent("idle")

    def _extra(self, step: int) -> dict[str, Any]:
        """Return the JSON values that go with the tensors of a checkpoint."""
        training, progress = self._training, self._training.progress
        return {
            **({} if training.base is None else {"base": training.base}),
            **({} if training.teacher is None else {"teacher": training.teacher}),
            **({"before_decay": True} if self.continuing.is_before_decay(step) else {}),
            **({"averages": averages} if (averages := training.averages.extra()) else {}),
            **({} if training.outer is None else {"outer": training.outer.state()}),
            **({"verified": progress.verified} if training.config.guards.recomputation is not None else {}),
            "step": step, "position": training.positions.end(step), "tokens": progress.tokens,
            "loss": progress.loss, "guard": self._guard.state(),
            "validation_loss": progress.validation_loss if progress.validated == step else None,
            "passed_over": [list(window) for window in training.positions.windows],
            "loss_scale": training.loss_scale.state() if training.loss_scale is not None else None, **self._constant,
            **({"sources": {name: list(sums) for name, sums in progress.sources.items()}} if progress.sources else {}),
            "unwritten": training.record.unwritten()}
