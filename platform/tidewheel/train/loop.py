"""The training loop: resume, step, make way, finish. Each task of a step boundary has a file of its own.

`train` is called once per worker and generation. It resumes from the newest intact checkpoint, so its caller answers a
lost worker by calling it again with the workers that are left.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tidewheel.train.batches import RankBatch
from tidewheel.train.callback import Callbacks, Worker
from tidewheel.train.config import TrainConfig
from tidewheel.train.curvature import Curvature
from tidewheel.train.evaluating import Evaluating
from tidewheel.train.growth import Growth
from tidewheel.train.guarding import Guarding
from tidewheel.train.guards.hang import Watch
from tidewheel.train.guards.policy import Guard
from tidewheel.train.guards.recomputation import Recomputation
from tidewheel.train.logs.line import HERE
from tidewheel.train.metrics.own_time import DeviceTime
from tidewheel.train.metrics.reporter import Reporter
from tidewheel.train.parallel import ParallelModel, legal
from tidewheel.train.parallel.data_parallel import blocks
from tidewheel.train.policy.publishing import Publishing
from tidewheel.train.precision import check_precision, fp32_products
from tidewheel.train.record import TrainResult
from tidewheel.train.recording import Recording
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.resuming import Resuming
from tidewheel.train.run import Run
from tidewheel.train.running_ahead import Pending, RunningAhead
from tidewheel.train.runtime import Control, Preempted, Runtime
from tidewheel.train.saving import Saving
from tidewheel.train.speed_shares import SpeedShares
from tidewheel.train.stage_steps import StageSteps
from tidewheel.train.step import SAVE, STOP, StartedStep, start_step
from tidewheel.train.storage_wait import StorageWait
from tidewheel.train.timeline import Timeline, ledger
from tidewheel.train.training import Training

logger = logging.getLogger(__name__)


def train(run: Run | TrainConfig, runtime: Runtime) -> TrainResult:
    """Do the steps of the run that no checkpoint has yet; do nothing for a run that is over.

    Args:
        run: the open run, or the settings to open it with.
        runtime: this worker's rank, device and services.

    Raises:
        ConfigError, ShardError, CheckpointError, StorageError: a problem that the user can fix.
        HangError, RuntimeError: a collective failed because another rank hangs or is gone; start again with the ranks
            that are left.
        SilentCorruptionError: two workers computed different bits; start again without those that it names.
        Preempted: the cluster changes the ranks, and everything is saved.
    """
    began = time.time()
    run = Run.open(run)
    config = run.config
    retry = StorageWait.of(config, runtime)
    HERE.begin(runtime.generation, runtime.rank)
    finished = retry(run.result)
    if finished is not None:
        return finished
    legal.check_world(config, runtime.world_size)
    check_precision(torch.device(runtime.device), config.precision, emulated=config.fp8.emulate)
    retry(run.check)  # before anything is written
    timeline = Timeline(ledger(run.store, runtime), runtime, began)
    with contextlib.ExitStack() as stack:
        stack.callback(timeline.close)
        stack.enter_context(fp32_products(torch.device(runtime.device), config.tf32 and not config.reproducible))
        if config.reproducible:
            stack.enter_context(deterministic_kernels())
        watch = Watch(config.guards, runtime.rank, runtime.world_size, name=str(runtime.generation),
                      on_hang=lambda finding: runtime.control.event("hang", found=finding),
                      break_off=runtime.group.break_off)
        stack.callback(watch.close)
        try:
            loop = Loop.open(run, runtime, timeline, watch, retry)
            stack.callback(loop.close)
            watch.include(loop.groups, loop.stage)
            loop.resume()
            timeline.spent("restart")
            loop.run()
            result = loop.finish()
            timeline.finish()
            return result
        except Preempted:
            timeline.spent("restart")
            raise
        except BaseException as error:
            explained = watch.explained(error)
            timeline.spent("detection")  # since the last whole step, mostly waiting for a rank that is gone
            if explained is not error:
                raise explained from error
            raise


class Loop:
    """One worker's steps, and the order of the tasks at each step boundary; see `train`."""

    def __init__(self, training: Training, guard: Guard) -> None:
        self._training, self._guard = training, guard
        config, runtime, manifest = training.config, training.runtime, training.source.manifest
        self._metrics = Reporter(
            config, training.record, training.collectives, generation=runtime.generation, gauges=runtime.gauges,
            on_event=runtime.control.event, own_time=device_time(training.model),
            flops_per_token=config.model.flops_per_token(training.vocabulary_size, manifest.sequence_length))
        self._callbacks = Callbacks(config.callbacks, Worker(
            config.run.id, config.run_uri, config.steps, runtime.rank, runtime.world_size, runtime.generation,
            self._metrics.add), partial(_callback_failed, runtime.control) if training.leads else None)
        self._saving = Saving(training, guard)
        self._resuming = Resuming(training, self._saving, guard)
        self._evaluating = Evaluating(training, self._metrics, self._callbacks)
        self._ahead = RunningAhead(training, self._saving, self._evaluating)
        self._recording = Recording(training, self._metrics, self._callbacks)
        self._speed_shares = SpeedShares(training, self._recording.digest)
        self._guarding = Guarding(training, guard, self._resuming, self._metrics, self._callbacks)
        self._recomputation = Recomputation(training, guard)
        self._curvature = Curvature(training)
        self._publishing = Publishing(config, training.model, training.record.store)
        self._growth = Growth(config, training.source, training.collectives, training.record, runtime.control,
                              training.retry)
        self._stages = StageSteps(config, training.model, training.optimizer, training.collectives,
                                  guard) if config.stage_schedule is not None else None
        self._began, self._waited = 0.0, 0.0  # since the last step was recorded

    @classmethod
    def open(cls, run: Run, runtime: Runtime, timeline: Timeline, watch: Watch, retry: StorageWait) -> Loop:
        """Open the data and build the model, whose values are set later.

        Args:
            run: the open run.
            runtime: this worker's rank, device and services.
            timeline: the worker's ledger.
            watch: notices hangs.
            retry: waits for storage.
        """
        config = run.config
        source, validation = run.data()
        training = Training.open(run, runtime, timeline, watch, retry)
        loop = cls(training, Guard(config.guards, training.device, scaled=training.loss_scale is not None))
        if training.leads:
            retry(lambda: training.record.write_run(
                config, source, validation, parameters=training.model.num_parameters,
                vocabulary_size=training.vocabulary_size))
        loop._saving.open()
        return loop

    @property
    def groups(self) -> Sequence[Any]:
        """Process groups that training uses beside the default one."""
        return self._training.model.mesh.groups()

    @property
    def stage(self) -> int:
        """This rank's stage of the pipeline."""
        return self._training.model.mesh.coordinate("pipeline")

    def resume(self) -> None:
        """Take model, optimizer and position from the newest intact checkpoint, or start at step 0."""
        training, progress, runtime = self._training, self._training.progress, self._training.runtime
        extra = self._resuming.load()
        recorded = training.retry(training.record.last_step) if training.leads else 0
        progress.recorded = training.collectives.from_first(recorded)
        self._metrics.open(step=progress.step, recorded=progress.recorded)
        logger.info("continuing after step %d of %d", progress.step, training.config.steps)
        kind = "start" if runtime.generation == 0 and extra is None else "resume"
        training.event(kind, step=progress.step, world_size=runtime.world_size, generation=runtime.generation,
                       redo=max(0, progress.recorded - progress.step),
                       **({"tier": extra.get("tier", "storage")} if extra is not None else {}))
        if training.outer is not None:
            runtime.checkpoints.settle()  # the memory tier may still copy what was loaded
            training.outer.begin(progress.step)
            training.timeline.spent("restart")
            self._meet(progress.step)
        self._publish(progress.step)
        self._callbacks.call("on_start", progress.step)
        if extra is None:
            self._evaluating.begin()
        else:
            self._evaluating.catch_up(extra["validation_loss"])
            self._evaluating.tasks.catch_up()

    def run(self) -> None:
        """Do all steps that are left.

        Raises:
            Preempted: this generation ends at a step boundary.
        """
        training, progress = self._training, self._training.progress
        self._began = time.time()
        pending: Pending | None = None
        while progress.step < training.config.steps:
            step = 1 + (progress.step if pending is None else pending.step)
            if pending is not None and not self._growth.reaches(training.positions.end(step)):
                self._end(pending)  # the wait for data may save
                pending = None
                continue
            started = self._start(step)
            if pending is not None and not self._end(pending, behind=started):
                pending = None
                continue
            pending = started
            if self._ahead.waits_for(step):
                self._end(pending)
                pending = None

    def _start(self, step: int) -> Pending:
        """Read the batch of a step and enqueue the step."""
        training = self._training
        HERE.step = step
        training.watch.mark(step, "data")
        waited = self._wait_for_data(step)
        self._began += waited
        batch = training.reader.read(step)
        waited += training.timeline.spent("data_wait")
        self._waited += waited
        training.watch.mark(step, "step")
        self._metrics.begin(step)
        training.waits.begin()
        started = self._enqueue(step, batch)
        training.waits.end()
        if self._ahead.on:
            self._metrics.measure(step, waited)
        else:
            started.result()
        digest = self._recording.digest.start(
            batch.ids, batch.indices if training.config.batch.reorders else None)
        return Pending(step, started, digest, training.optimizer.learning_rate)

    def _end(self, pending: Pending, behind: Pending | None = None) -> bool:
        """Wait for a step and do what follows it; return whether the run continues behind it and does not go back.

        Args:
            pending: the step.
            behind: the next step, if it has started; it is dropped if the run goes back.
        """
        training, progress, step = self._training, self._training.progress, pending.step
        result, spent = pending.started.result(), training.spent_on(step)
        if training.loss_scale is not None:
            training.loss_scale.update(math.isfinite(result.gradient_norm))
        communication = training.waits.take()
        training.timeline.spent(spent, communication)
        digest = pending.digest()
        self._ahead.ended(result)
        self._guarding.check(step, result, digest)
        goes_back = result.verdict.action == "rollback"
        if goes_back:
            if behind is not None:
                behind.started.drop()
            self._recording.batch(step, digest)
            self._guarding.roll_back(step, result.verdict)
            self._ahead.restart()
        else:
            progress.step = step
            progress.tokens += result.tokens
            progress.loss = result.loss if math.isfinite(result.loss) else progress.loss
            self._recording.step(result, digest, time.time() - self._began, self._waited,
                                 learning_rate=pending.learning_rate,
                                 gradient_bytes=pending.started.gradient_bytes, communication=communication)
            training.timeline.spent(spent)  # recording is part of the step, not of the next wait
            self._speed_shares.step()
            self._meet(step)
            self._after(step, result.asked)
        training.watch.started()
        self._began, self._waited = time.time(), 0.0  # a step's seconds leave out the save, the evaluation and the wait
        return not goes_back

    def _meet(self, step: int) -> None:
        """Meet the other groups, if a round ends with this step. A planned change interrupts the wait for them."""
        training, saving, outer = self._training, self._saving, self._training.outer

        def ask() -> int:
            training.timeline.spent("idle")  # a group that is killed while it waits loses little of its ledger
            return STOP * training.runtime.control.poll()

        while outer is not None and outer.is_due(step):
            training.watch.mark(step, "outer")
            saving.settle()
            asked = outer.meet(step, ask)
            training.timeline.spent("idle")
            if asked:
                saving.keep_if_due(step, asked)
                if not saving.is_safe(step):
                    saving.save(step)
                saving.make_way(step)
            elif figures := outer.figures():
                self._metrics.add(step, figures)

    def _wait_for_data(self, step: int) -> float:
        """Wait until the shard set holds the sequences of `step`; return the seconds waited.

        Saves and planned changes happen meanwhile.
        """
        training, saving = self._training, self._saving
        done = training.progress.step
        waited = 0.0
        while not self._growth.reaches(end := training.positions.end(step)):
            asked = self._growth.wait(step, end, partial(saving.requests, done))
            waited += training.timeline.spent("data_wait")
            if done:
                saving.keep_if_due(done, asked)
            if done and (asked & SAVE or (asked & STOP and not saving.is_safe(done))):
                saving.save(done)
            if asked & STOP:
                saving.make_way(done)
            training.watch.mark(step, "data")
        return waited

    def _enqueue(self, step: int, batch: RankBatch) -> StartedStep:
        training, config = self._training, self._training.config
        training.optimizer.set_learning_rate(training.rates.of(step))
        if self._stages is not None:
            return self._stages.start(step, batch.micro_batches, partial(self._ahead.ask, step), self._saving.settle)
        self._curvature.before(step, batch.micro_batches)
        before_update = self._recomputation.before(step, batch.micro_batches, self._saving.settle)
        started = start_step(training.model, training.optimizer, batch.micro_batches, training.collectives,
                          virtual_ranks=config.batch.virtual_ranks, clip_norm=config.optimizer.clip_norm,
                          precision=config.precision, loss_scale=training.loss_scale,
                          ask=partial(self._ahead.ask, step), guard=self._guard, before_update=before_update,
                          sources=len(training.sources))
        training.averages.take(step)
        return started

    def _after(self, step: int, asked: int) -> None:
        """Do the tasks of a step boundary: a save, an evaluation (while the save is written), a planned stop."""
        config, saving, evaluating = self._training.config, self._saving, self._evaluating
        stop, evaluate = bool(asked & STOP), evaluating.is_due(step)
        self._report_commits()
        self._publish(step)
        saving.keep_if_due(step, asked)
        if evaluate and config.checkpoint.keep_best:  # the checkpoint holds its score
            evaluating.evaluate()
        if asked & SAVE or step == config.steps or (stop and not saving.is_safe(step)):
            saving.save(step)
        if evaluate and not config.checkpoint.keep_best:
            evaluating.evaluate()
        evaluating.sample_if_due(step)
        evaluating.tasks.evaluate_if_due(step)
        if stop and step < config.steps:
            saving.make_way(step)

    def _publish(self, step: int) -> None:
        """Publish the policy for rollouts, if the run makes any."""
        training, publishing = self._training, self._publishing
        if not publishing.is_due(step):
            return
        tensors = publishing.gather()
        training.retry(lambda: publishing.write(step, tensors))
        training.timeline.spent("save_stall")

    def _report_commits(self) -> None:
        if self._training.leads and (step := self._saving.committed()) >= 0:
            self._callbacks.call("on_checkpoint", step)

    def finish(self) -> TrainResult:
        """Evaluate, write a text sample, save for the last time, and write result.json."""
        training, progress = self._training, self._training.progress
        self._evaluating.evaluate()
        sample = self._evaluating.sample()
        self._evaluating.tasks.evaluate()
        self._saving.save_finished()
        self._report_commits()
        result = TrainResult(
            steps=progress.step, tokens=progress.tokens, loss=progress.loss,
            validation_loss=progress.validation_loss, sample=sample,
            seconds=time.time() - training.record.started(), run_uri=training.config.run_uri)
        self._callbacks.call("on_finish", result)
        self._metrics.finish()
        if training.leads:
            training.record.flush()
            training.record.write_result(result)
        training.event("finish", step=result.steps, loss=result.loss, validation_loss=result.validation_loss)
        return result

    def close(self) -> None:
        """End the threads and hand over buffered lines."""
        self._callbacks.close()
        self._evaluating.answers.close()
        self._training.reader.close()
        self._training.optimizer.close()
        self._training.waits.close()
        self._metrics.close()
        self._training.record.close()


def device_time(model: ParallelModel) -> DeviceTime | None:
    """Return what measures a GPU's own time; None on other devices, whose threads compute themselves."""
    if model.device.type != "cuda":
        return None
    return DeviceTime(block for part in model.parts for block in blocks(part))


def _callback_failed(control: Control, callback: str, hook: str, reason: str, failures: int) -> None:
    """Record that a callback failed. It holds no model: a generation that ends frees its own without a cycle."""
    control.event("callback_failed", callback=callback, hook=hook, reason=reason, failures=failures)
