"""Start a generation of workers from the newest intact checkpoint, or from step 0."""

from __future__ import annotations

from typing import Any

import torch

from tidewheel.models.decoder import VALUE_HEAD
from tidewheel.train import checks, parallel
from tidewheel.train.branching import Branch
from tidewheel.train.guards.policy import Guard
from tidewheel.train.optim.build import model_state
from tidewheel.train.parallel import adapter_weights, initial_weights, teacher
from tidewheel.train.parallel.before import Teacher
from tidewheel.train.parallel.building import HEAD_WEIGHT
from tidewheel.train.parallel.caches import check_current
from tidewheel.train.record import read_rollbacks
from tidewheel.train.runtime import Loaded
from tidewheel.train.saving import Saving
from tidewheel.train.teacher_config import live_teacher
from tidewheel.train.training import Training


class Resuming:
    """Resumes one worker; all ranks make the same calls.

    Args:
        training: this worker's share of the run.
        saving: saves step 0 where a rollback may need it.
        guard: its counts come from the checkpoint.
    """

    def __init__(self, training: Training, saving: Saving, guard: Guard) -> None:
        self._training, self._saving, self._guard = training, saving, guard
        self._continuing = saving.continuing

    def load(self) -> dict[str, Any] | None:
        """Set the values of model and optimizer; return the checkpoint's `extra`, None at step 0.

        The checkpoint is the newest whose learning rate the present settings would not raise again after a decay, or
        that of the run's parent at the start of a branch.

        Raises:
            ConfigError: the checkpoint does not fit the run's configuration.
            CheckpointError: the checkpoint does not fit the run's record.
        """
        training = self._training
        training.watch.mark(0, "load")
        self._set_base()
        self._set_teacher()
        state = training.state()
        tensors = [tensor for group in state.values() for tensor in group.values()]
        check_current(tensors, training.model.mesh.mark)
        extra = training.runtime.checkpoints.load_latest(state, self._continuing.usable)
        passed_by, stable = map(training.collectives.from_first, self._continuing.passed_by)
        if extra is None and passed_by:
            raise self._continuing.missing(passed_by, stable)
        branch = Branch.parse(training.config.run.branch) if training.config.run.branch else None
        branches_off = extra is None and branch is not None
        if branches_off and branch is not None:
            extra = self._branch_off(branch, state)
        self._take_rollbacks()
        if extra is None:
            self._set_weights()
            training.optimizer.started()
            training.averages.begin(0)
            if training.config.guards.may_roll_back:
                self._saving.save(0)
            return None
        checks.same_base(extra.get("base"), training.base, training.config)
        checks.same_teacher(extra.get("teacher"), training.teacher)
        checks.continues(extra["identity"], training.config, training.source)
        checks.same_history(extra, training.positions, training.config)
        self.continue_from(extra)
        if branches_off or passed_by:
            # from here on the state is the newest of this run itself
            training.progress.saved = -1
            self._saving.save(training.progress.step)
        if passed_by:
            training.event("continued_before_decay", step=training.progress.step, newest=passed_by,
                           steps=training.config.steps)
        if branches_off:
            training.event("branched", step=training.progress.step, parent=training.config.run.branch)
        elif training.leads:
            training.record.restore(extra.get("unwritten", {}))
        if training.runtime.checkpoints.has_memory():
            self._saving.keep(training.progress.step)  # until then a lost node's part has only one copy
        return extra

    def continue_from(self, extra: dict[str, Any]) -> None:
        """Continue from the checkpoint that was loaded, given its `extra`."""
        training, progress = self._training, self._training.progress
        progress.step = int(extra["step"])
        progress.verified = min(progress.step, int(extra.get("verified", progress.step)))
        self._saving.continue_from(extra)
        progress.tokens, progress.loss = int(extra["tokens"]), extra["loss"]
        progress.sources = {name: list(sums) for name, sums in extra.get("sources", {}).items()}
        if "guard" in extra:
            self._guard.load(extra["guard"])
        if training.loss_scale is not None and extra.get("loss_scale"):
            training.loss_scale.restore(extra["loss_scale"])
        if training.outer is not None and "outer" in extra:
            training.outer.restore(extra["outer"])
        training.optimizer.restored()
        training.model.refresh()
        if begun := training.averages.begin(progress.step, extra.get("averages")):
            training.event("average_began", step=progress.step, averages=begun)

    def _set_base(self) -> None:
        """Set the frozen base of an adapter, which the run's own checkpoints do not hold."""
        training = self._training
        if training.model.adapter is None:
            return
        kept = training.runtime.kept
        if kept is not None and self._agree(kept.fits(training.model)):
            base = kept.fill(training.model)
            training.event("base_kept", base=base.uri)
        else:
            base = self._read_base()
        if kept is not None:
            kept.keep(training.model, base)
        training.base = {"from": base.uri, "hash": base.hash, "vocabulary_size": training.vocabulary_size}

    def _read_base(self) -> Loaded:
        """Read the frozen base from storage, or draw its initial values; return which it is."""
        training = self._training
        uri = training.config.model.init_from
        bases = [Loaded("", f"seed {training.config.seed}")]
        if uri:
            adapter_weights.set_base(training.model, lambda values: bases.append(
                training.runtime.checkpoints.load_from(uri, {"model": dict(values)})))
        else:
            initial_weights.init_base(training.model, training.config.seed)
        return bases[-1]

    def _agree(self, fits: bool) -> bool:
        """Return whether all ranks say yes: they read together or not at all."""
        collectives = self._training.collectives
        missing = collectives.sum(torch.tensor([0.0 if fits else 1.0], dtype=torch.float64))
        return not collectives.to_host(missing).any()

    def _set_teacher(self) -> None:
        """Set the values of a live teacher, which the run's own checkpoints do not hold."""
        training = self._training
        before = training.model.before
        if isinstance(before, Teacher):
            loaded = teacher.load(before, live_teacher(training.config), training.runtime)
            training.teacher = {"from": loaded.uri, "hash": loaded.hash}

    def _set_weights(self) -> None:
        """Set the initial values, or those of `adapter.init_from` or `model.init_from`.

        An objective's own head starts anew, unless `adapter.init_from` has one.
        """
        training = self._training
        config = training.config
        if training.model.adapter is not None:
            adapter_weights.init_adapter(training.model, config.seed)
            initial_weights.init_head(training.model, config.seed)
            if training.model.adapter.init_from:
                head = f"model/{HEAD_WEIGHT}" if config.objective.HEAD else ""
                values = {"model": training.state()["model"]}
                training.runtime.checkpoints.load_from(training.model.adapter.init_from, values, head)
                training.model.refresh()
            return
        if not config.model.init_from or config.objective.HEAD or config.objective.VALUES:
            parallel.init_weights(training.model, config.seed)
        if not config.model.init_from:
            return
        weights = model_state(training.model)
        if config.objective.HEAD:
            del weights[HEAD_WEIGHT]
        weights.pop(VALUE_HEAD, None)
        training.runtime.checkpoints.load_from(config.model.init_from, {"model": weights})
        training.model.refresh()

    def _branch_off(self, branch: Branch, state: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors from the parent's checkpoint; return its `extra`."""
        training = self._training
        extra = training.runtime.checkpoints.load_branch(branch.uri, branch.step, state)
        if training.leads:
            count = len(extra.get("passed_over", ()))
            training.retry(lambda: training.record.take_over_rollbacks(branch.uri, count))
        return extra

    def _take_rollbacks(self) -> None:
        """Pass over the windows of the run's rollbacks and lower the rates behind them, as rank 0 reads them."""
        training, first = self._training, self._training.collectives.from_first
        lines = training.retry(lambda: read_rollbacks(training.record.store)) if training.leads else []
        rollbacks = [(line["start"], line["end"], line["back_to"]) for line in lines]
        count = first(len(rollbacks))
        known = [[first(value) for value in rollback] for rollback in rollbacks or [(0, 0, 0)] * count]
        training.pass_over([(start, end) for start, end, _ in known])
        training.rates.lower_after([back_to for *_, back_to in known])
