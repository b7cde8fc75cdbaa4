"""Record each step: its figures, and which sequences it read."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidewheel.train.batches import BatchDigest
from tidewheel.train.callback import Callbacks, Step
from tidewheel.train.metrics.reporter import Reporter
from tidewheel.train.parallel.expert_load import figures as expert_figures
from tidewheel.train.rollout_batch import rollout_batch
from tidewheel.train.run_state import finite
from tidewheel.train.step import StepResult
from tidewheel.train.training import Training


class Recording:
    """Records the steps of one worker; all ranks make the same calls.

    Args:
        training: this worker's share of the run.
        metrics: takes the figures.
        callbacks: are called for each step.
    """

    def __init__(self, training: Training, metrics: Reporter, callbacks: Callbacks) -> None:
        self._training, self._metrics, self._callbacks = training, metrics, callbacks
        self.digest = BatchDigest(training.source, training.collectives, training.model.mesh, training.model.share,
                                  training.config.batch.micro_sequences)

    def step(self, result: StepResult, digest: str | None, seconds: float, waited: float, *,
             learning_rate: float, gradient_bytes: int | None = None, communication: float = 0.0) -> None:
        """Record a step that is done.

        Args:
            result: what the step measured.
            digest: digest of the global batch's sequences, on rank 0.
            seconds: duration of the step on this rank, with the wait for data.
            waited: seconds of the wait for data.
            learning_rate: of the step.
            gradient_bytes: bytes of gradients that this rank sent; None: not known.
            communication: seconds for which the step waited for other workers.
        """
        training, progress = self._training, self._training.progress
        figures: dict[str, Any] = {
            "tokens": progress.tokens, "loss": finite(result.loss), "gradient_norm": finite(result.gradient_norm),
            "learning_rate": learning_rate}
        if result.metrics:
            figures["objective"] = {name: finite(value) for name, value in result.metrics.items()}
        figures |= expert_figures(result.experts)
        if result.sources:
            figures |= self._by_source(result)
        if gradient_bytes is not None:
            figures["gradient_bytes"] = gradient_bytes
        if training.outer is not None:
            figures["outer_base"] = training.outer.base()
        if training.loss_scale is not None:
            figures["loss_scale"] = training.loss_scale.scale
        if training.leads:
            figures["failed_saves"] = training.runtime.checkpoints.saves().failed
            if training.runtime.checkpoints.has_memory():
                kept = training.runtime.checkpoints.keeping()
                figures |= {"kept_step": kept.step, "keep_waits": kept.waits, "skipped_keeps": progress.skipped_keeps}
        self._metrics.step(progress.step, figures, tokens=result.tokens, seconds=seconds, waited=waited,
                           communication=communication)
        if training.leads:
            self.batch(progress.step, digest)
            training.runtime.control.progress(
                progress.step, training.config.steps, loss=result.loss, tokens=progress.tokens,
                tokens_per_second=result.tokens / max(seconds, 1e-9), world_size=training.runtime.world_size)
        self._callbacks.call("on_step_end", Step(
            progress.step, progress.tokens, finite(result.loss), finite(result.gradient_norm),
            learning_rate, seconds, waited, progress.step <= progress.recorded, result.metrics))

    def _by_source(self, result: StepResult) -> dict[str, Any]:
        """Add a step to the sums by source; return the losses since the last line of metrics if a line is due."""
        training, sums = self._training, self._training.progress.sources
        for name, (nats, targets) in zip(training.sources, result.sources):
            before = sums.get(name, [0.0, 0.0])
            sums[name] = [before[0] + nats, before[1] + targets]
        if not self._metrics.is_due(training.progress.step):
            return {}
        losses = {name: {"loss": finite(nats / targets), "tokens": int(targets)}
                  for name, (nats, targets) in sums.items() if targets}
        sums.clear()
        return {"sources": losses}

    def batch(self, step: int, digest: str | None) -> None:
        """Record on rank 0 which sequences a step read."""
        training = self._training
        if training.leads:
            positions = training.positions.of(step)
            windows = len(training.positions.windows)
            training.record.batches.append({
                "step": step, "digest": digest, "position": int(positions[0]), "count": len(positions),
                "world_size": training.runtime.world_size, "generation": training.runtime.generation,
                **({"passed_over": windows} if windows else {}), **self._of_rollouts(positions)})

    def _of_rollouts(self, positions: np.ndarray) -> dict[str, Any]:
        """Return which groups of a wave of rollouts a step trained on, if waves have several steps."""
        rollouts = self._training.config.rollouts
        if rollouts is None or rollouts.wave_steps == 1:
            return {}
        return rollout_batch(self._training.source, positions, rollouts.group)
