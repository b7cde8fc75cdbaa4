"""The training loop: resume, step, save, make way, finish.

`train` is called once per worker and generation. It continues from the newest intact checkpoint by
itself, so whoever runs it answers a lost worker by calling it again with the workers there are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidewheel import storage
from tidewheel.errors import ConfigError
from tidewheel.parts import as_json
from tidewheel.shards.loader import Loader
from tidewheel.shards.manifest import Manifest
from tidewheel.shards.source import Source, SourceReader
from tidewheel.train import checks, evaluation, parallel
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.batches import BatchDigest, BatchReader, RankBatch
from tidewheel.train.collectives import Collectives
from tidewheel.train.compile import use_cache
from tidewheel.train.config import TrainConfig
from tidewheel.train.evaluation import ValidationSet
from tidewheel.train.growth import Growth
from tidewheel.train.guards import policy
from tidewheel.train.guards.hang import Watch
from tidewheel.train.guards.policy import Guard, Verdict
from tidewheel.train.logs.line import HERE
from tidewheel.train.memory.host import keep_freed_memory
from tidewheel.train.metrics import weights_and_biases
from tidewheel.train.metrics.reporter import Reporter
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.outage import Patience
from tidewheel.train.parallel import ParallelModel, legal
from tidewheel.train.parallel.caches import check_current
from tidewheel.train.positions import Positions, Window
from tidewheel.train.precision import LossScale, check_precision
from tidewheel.train.record import RunRecord, TrainResult, read_rollbacks
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.run_state import Progress, finite
from tidewheel.train.runtime import MadeWay, Runtime, read_again
from tidewheel.train.save_schedule import SaveSchedule
from tidewheel.train.step import SAVE, STOP, StepResult, train_step
from tidewheel.train.timeline import Category, Timeline, ledger

logger = logging.getLogger(__name__)


def train(config: TrainConfig, runtime: Runtime) -> TrainResult:
    """Run the steps of `config` that no checkpoint has yet; a run that is over does nothing.

    Raises:
        ConfigError, ShardError, CheckpointError, StorageError: something a user can mend.
        HangError, RuntimeError: a collective failed because another rank stands still or is gone; start again with the
            ranks that are left.
        MadeWay: the cluster asked for the ranks to be changed, and everything is saved.
    """
    began, place, patience = time.time(), storage.store(config.run_uri), Patience.of(config, runtime)
    HERE.begin(runtime.generation, runtime.rank)
    finished = patience(lambda: checks.finished(config))
    if finished is not None:
        return finished
    legal.check_world(config, runtime.world_size)
    check_precision(torch.device(runtime.device), config.precision)
    weights_and_biases.check(config.metrics.wandb)
    source, validation = patience(lambda: checks.read_data(config))  # before anything is written
    timeline = Timeline(ledger(place, runtime), runtime, began)
    with contextlib.ExitStack() as stack:
        stack.callback(timeline.close)
        if config.reproducible:
            stack.enter_context(deterministic_kernels())
        watch = Watch(config.guards, runtime.rank, runtime.world_size, name=str(runtime.generation),
                      on_hang=lambda found: runtime.control.event("hang", found=found))
        stack.callback(watch.close)
        try:
            loop = Loop.open(config, runtime, timeline, source, validation, watch, patience)
            stack.callback(loop.close)
            watch.include(loop.model.mesh.groups())
            loop.resume()
            timeline.spent("restart")
            loop.run()
            result = loop.finish()
            timeline.finish()
            return result
        except MadeWay:
            timeline.spent("restart")
            raise
        except BaseException as error:
            found = watch.explained(error)
            timeline.spent("detection")  # since the last whole step: most of it is waiting for a rank that is gone
            if found is not error:
                raise found from error
            raise


@dataclass
class Loop:
    """One worker's share of a run; see `train`."""

    config: TrainConfig
    runtime: Runtime
    timeline: Timeline
    record: RunRecord
    collectives: Collectives
    source: Source
    validation: list[ValidationSet]
    model: ParallelModel
    optimizer: ModelOptimizer
    reader: BatchReader
    digest: BatchDigest
    metrics: Reporter
    progress: Progress
    loss_scale: LossScale | None
    positions: Positions
    guard: Guard
    watch: Watch
    patience: Patience
    growth: Growth
    constant: dict[str, Any]
    """What every checkpoint says alike: what the run is."""
    schedule: SaveSchedule | None = None
    """When to save; on rank 0."""

    @classmethod
    def open(cls, config: TrainConfig, runtime: Runtime, timeline: Timeline, source: Source,
             validation: Mapping[str, Manifest], watch: Watch, patience: Patience) -> Loop:
        """Open the data and build the model; its values are not yet set."""
        device = torch.device(runtime.device)
        if device.type == "cpu":
            torch.set_num_threads(max(1, int(config.elastic.cpus_per_worker)))
            keep_freed_memory()
        if config.compile:
            use_cache(config.compile_cache)
        collectives = Collectives(runtime)
        vocabulary = config.model.vocabulary_size or source.manifest.vocabulary_size
        model = parallel.build(config, vocabulary, runtime)
        cache = Path(config.data.cache) if config.data.cache else None
        positions = Positions(BatchSizes.of(config.batch, source.manifest.sequence_length))
        reading: dict[str, Any] = {"cache": cache, "verify": config.data.verify,
                                   "on_damage": partial(read_again, runtime.control)}
        reader = BatchReader(Loader(SourceReader(source, **reading), prefetch=0), config.batch, positions,
                             model.share, device=device, steps=config.steps, ahead=config.data.prefetch,
                             limit=runtime.limit)
        record = RunRecord(storage.store(config.run_uri), runtime.generation, runtime.past)
        metrics = Reporter(
            config, record, collectives, generation=runtime.generation, extra=runtime.sinks,
            on_event=runtime.control.event,
            flops_per_token=config.model.flops_per_token(vocabulary, source.manifest.sequence_length))
        loop = cls(
            config=config, runtime=runtime, timeline=timeline, record=record,
            collectives=collectives, source=source,
            validation=patience(lambda: evaluation.open_sets(config, device)), model=model,
            optimizer=build_optimizer(model, config.optimizer),
            digest=BatchDigest(source, collectives, model.mesh, model.share, config.batch.micro_sequences),
            progress=Progress(), reader=reader, metrics=metrics, positions=positions,
            loss_scale=LossScale() if config.precision == "fp16" else None,
            guard=Guard(config.guards, device, scaled=config.precision == "fp16"), watch=watch, patience=patience,
            growth=Growth(config, source, collectives, record, runtime.control, patience),
            constant={"recipe_hash": config.recipe_hash(), "identity": checks.identity(config, source),
                      "seed": config.seed, "schedule": {**as_json(config.schedule), "steps": config.steps}})
        if runtime.rank == 0:
            patience(lambda: record.write_run(config, source, validation, parameters=model.num_parameters,
                                              vocabulary_size=vocabulary))
            loop.schedule = patience(lambda: SaveSchedule(config.checkpoint, started=record.started(),
                                                          failures=record.failures()))
        return loop

    def resume(self) -> None:
        """Take model, optimizer and position from the newest intact checkpoint, or start at step 0."""
        progress = self.progress
        self.watch.mark(0, "load")
        state = training_state(self.model, self.optimizer)
        tensors = [tensor for group in state.values() for tensor in group.values()]
        check_current(tensors, self.model.mesh.mark)
        extra = self.runtime.checkpoints.load_latest(state)
        self._pass_over(self._windows())
        if extra is None:
            self._set_weights()
            self.optimizer.started()
            if self.config.guards.may_roll_back:
                self._save(0)
        else:
            checks.continues(extra["identity"], self.config, self.source)
            checks.same_history(extra, self.positions, self.config)
            self._take_up(extra)
            if self.runtime.rank == 0:
                self.record.restore(extra.get("unwritten", {}))
            if self.runtime.checkpoints.keeps(progress.step):
                self._keep(progress.step)  # until then a part of a lost node has one copy only
        recorded = self.patience(self.record.last_step) if self.runtime.rank == 0 else 0
        progress.recorded = self.collectives.from_first(recorded)
        self.metrics.open(step=progress.step, recorded=progress.recorded)
        logger.info("goes on after step %d of %d", progress.step, self.config.steps)
        kind = "start" if self.runtime.generation == 0 and extra is None else "resume"
        self._event(kind, step=progress.step, world_size=self.runtime.world_size, generation=self.runtime.generation,
                    redo=max(0, progress.recorded - progress.step),
                    **({"tier": extra.get("tier", "storage")} if extra is not None else {}))
        if extra is not None and extra["validation_loss"] is None and self._evaluates_at(progress.step):
            done = self.runtime.rank == 0 and self.patience(lambda: self.record.evaluated(progress.step))
            if not self.collectives.from_first(int(done)):  # whoever was about to is gone
                self._evaluate()

    def _set_weights(self) -> None:
        """Initial values, or those of `model.init_from`."""
        if not self.config.model.init_from:
            parallel.init_weights(self.model, self.config.seed)
            return
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.runtime.checkpoints.load_from(self.config.model.init_from, {"model": weights})
        self.model.refresh()

    def _take_up(self, extra: dict[str, Any]) -> None:
        """Be where the checkpoint that was loaded is."""
        progress = self.progress
        progress.step = int(extra["step"])
        progress.saved = -1 if extra.get("tier") == "memory" else progress.step
        if self.schedule is not None and extra.get("tier") == "memory":
            self.schedule.owed = bool(extra.get("save_owed"))
        progress.tokens, progress.loss = int(extra["tokens"]), extra["loss"]
        if "guard" in extra:
            self.guard.load(extra["guard"])
        if self.loss_scale is not None and extra.get("loss_scale"):
            self.loss_scale.restore(extra["loss_scale"])
        self.optimizer.restored()
        self.model.refresh()

    def _windows(self) -> list[Window]:
        """What the run's rollbacks pass over, as rank 0 finds it recorded."""
        lines = self.patience(lambda: read_rollbacks(self.record.store)) if self.runtime.rank == 0 else []
        mine = [(line["start"], line["end"]) for line in lines]
        count = self.collectives.from_first(len(mine))
        first = self.collectives.from_first
        return [(first(start), first(end)) for start, end in mine or [(0, 0)] * count]

    def _pass_over(self, windows: Sequence[Window]) -> None:
        """From now on steps take the positions that lie outside `windows`."""
        self.positions = Positions(self.positions.sizes, windows)
        checks.still_reaches(self.config, self.source, self.positions)
        self.reader.start_over(self.positions)

    def run(self) -> None:
        """All steps that are left."""
        began = time.time()
        while self.progress.step < self.config.steps:
            step = self.progress.step + 1
            HERE.step = step
            self.watch.mark(step, "data")
            waited = self._wait_for_data(step)
            began += waited
            batch = self.reader.read(step)
            waited += self.timeline.spent("data_wait")
            self.watch.mark(step, "step")
            self.metrics.begin(step)
            result = self._step(step, batch)
            spent = self._spent(step)
            self.timeline.spent(spent)
            digest = self.digest.of(batch.ids)
            self._guard(step, result, digest)
            if result.verdict.action == "rollback":
                self._record_batch(step, digest)
                self._roll_back(step, result.verdict)
            else:
                self.progress.step = step
                self.progress.tokens += result.tokens
                self.progress.loss = result.loss if math.isfinite(result.loss) else self.progress.loss
                self._write(result, digest, time.time() - began, waited)
                self.timeline.spent(spent)  # telling of a step is part of it, not of waiting for the next one's data
                self._after(step, result.asked)
            self.watch.started()
            began = time.time()  # a step's seconds are its own: not the save, the evaluation, the wait

    def _wait_for_data(self, step: int) -> float:
        """Until the shard set has grown to what `step` reads; seconds. Saves and planned changes do not wait."""
        done, waited = self.progress.step, 0.0
        while not self.growth.reaches(end := self.positions.end(step)):
            asked = self.growth.wait(step, end, partial(self._ask, done))
            waited += self.timeline.spent("data_wait")
            if done and (asked & SAVE or (asked & STOP and not self._is_safe(done))):
                self._save(done)
            if asked & STOP:
                self._make_way(done)
            self.watch.mark(step, "data")
        return waited

    def _step(self, step: int, batch: RankBatch) -> StepResult:
        config = self.config
        done, total = step, config.steps
        if config.schedule.unit == "tokens":
            length, sizes = self.source.manifest.sequence_length, self.positions.sizes
            done, total = sizes.total(step) * length, sizes.total(config.steps) * length
        self.optimizer.set_learning_rate(config.schedule.learning_rate(done, total, config.optimizer.learning_rate))
        asked = self._ask(step) if self.runtime.rank == 0 else 0
        result = train_step(self.model, self.optimizer, batch.micro_batches, self.collectives, asked=asked,
                            virtual_ranks=config.batch.virtual_ranks, clip_norm=config.optimizer.clip_norm,
                            precision=config.precision, loss_scale=self.loss_scale, guard=self.guard,
                            before_update=self._settle)
        if self.loss_scale is not None:
            self.loss_scale.update(math.isfinite(result.gradient_norm))
        return result

    def _spent(self, step: int) -> Category:
        """What the time of a step is for."""
        return "redone" if step <= self.progress.recorded else "productive"

    def _settle(self) -> None:
        """Before an update: what is to be kept of the values there are has been copied."""
        self.timeline.spent(self._spent(self.progress.step + 1))
        self.runtime.checkpoints.settle()
        self.timeline.spent("save_stall")

    def _ask(self, step: int) -> int:
        """Rank 0: what all ranks shall do after this step."""
        control, schedule = self.runtime.control, self.schedule
        stop = control.poll()
        due = schedule is not None and schedule.due(step, self.runtime.checkpoints.saves())
        if schedule is not None and due and stop:  # who makes way does not wait for it: the next generation saves
            schedule.owed = True
        return STOP * stop | SAVE * ((due and not stop) or control.save_wanted())

    def _guard(self, step: int, result: StepResult, digest: str | None) -> None:
        """Record what the guard has to say; ConfigError when it ends the run."""
        if result.verdict.reason == "overflow" and self.loss_scale is not None:
            self._event("overflow", step=step, loss_scale=self.loss_scale.scale)
        elif result.verdict.reason:
            self._event("guard", **policy.event(result.verdict, step, self.positions.of(step), digest, result.loss,
                                                result.gradient_norm))
            self.guard.check(result.verdict, step, self.config.run_uri)

    def _roll_back(self, step: int, verdict: Verdict) -> None:
        """Go back to the newest checkpoint, and pass over the data that ended in this step from now on."""
        config, windows = self.config, self.positions.windows
        self.guard.check_rollbacks(len(windows), verdict, step, config.run_uri)
        self.watch.mark(step, "rollback")
        extra = self.runtime.checkpoints.load_saved(training_state(self.model, self.optimizer))
        if extra is None:
            raise ConfigError(f"{verdict.reason} at step {step}, and no checkpoint to go back to", where=config.run_uri,
                              mend="set checkpoint.every_steps, or guards.non_finite and guards.spike to skip")
        back_to = int(extra["step"])
        window = policy.window(self.positions, step, back_to, config.guards.pass_over)
        if self.runtime.rank == 0:
            self.record.pass_over(step, back_to, window)
        self._pass_over((*windows, window))
        self._take_up(extra)
        self.metrics.restart(self.progress.step)
        self.progress.recorded = max(self.progress.recorded, step)
        self.timeline.spent("restart")
        self._event("rollback", step=step, back_to=back_to, position=window[0], count=window[1] - window[0],
                    reason=verdict.reason)

    def _write(self, result: StepResult, digest: str | None, seconds: float, waited: float) -> None:
        config, progress = self.config, self.progress
        figures: dict[str, Any] = {
            "tokens": progress.tokens, "loss": finite(result.loss), "gradient_norm": finite(result.gradient_norm),
            "learning_rate": self.optimizer.learning_rate}
        if result.metrics:
            figures["objective"] = {name: finite(value) for name, value in result.metrics.items()}
        if self.loss_scale is not None:
            figures["loss_scale"] = self.loss_scale.scale
        if self.runtime.rank == 0:
            figures["failed_saves"] = self.runtime.checkpoints.saves().failed
        self.metrics.step(progress.step, figures, tokens=result.tokens, seconds=seconds, waited=waited)
        if self.runtime.rank != 0:
            return
        self._record_batch(progress.step, digest)
        self.runtime.control.progress(progress.step, config.steps, loss=result.loss, tokens=progress.tokens,
                                      tokens_per_second=result.tokens / max(seconds, 1e-9),
                                      world_size=self.runtime.world_size)

    def _record_batch(self, step: int, digest: str | None) -> None:
        if self.runtime.rank == 0:
            taken, windows = self.positions.of(step), len(self.positions.windows)
            self.record.batches.append({
                "step": step, "digest": digest, "position": int(taken[0]), "count": len(taken),
                "world_size": self.runtime.world_size, "generation": self.runtime.generation,
                **({"passed_over": windows} if windows else {})})

    def _after(self, step: int, asked: int) -> None:
        """What a step boundary may bring: a save, an evaluation (while the save is written), a planned stop."""
        config, stop = self.config, bool(asked & STOP)
        wanted, evaluate = config.evaluation, self._evaluates_at(step)
        if self.runtime.checkpoints.keeps(step):
            self._keep(step)
        if evaluate and config.checkpoint.keep_best:  # the checkpoint says how good it is
            self._evaluate()
        if asked & SAVE or step == config.steps or (stop and not self._is_safe(step)):
            self._save(step)
        if evaluate and not config.checkpoint.keep_best:
            self._evaluate()
        if wanted.sample_every_steps and step % wanted.sample_every_steps == 0 and step < config.steps:
            self._sample()
        if stop and step < config.steps:
            self._make_way(step)

    def _evaluates_at(self, step: int) -> bool:
        """Whether the training itself evaluates the model of this step, the last one's apart."""
        wanted = self.config.evaluation
        return (bool(wanted.every_steps) and step % wanted.every_steps == 0 and 0 < step < self.config.steps
                and not (wanted.separate and self.runtime.evaluated_beside))

    def _evaluate(self) -> None:
        if not self.validation:
            return
        self.watch.mark(self.progress.step, "evaluate")
        scores = evaluation.validate(self.model, self.validation, self.config, self.collectives)
        self.progress.validation_loss = evaluation.overall(scores)
        self.progress.validated = self.progress.step
        self.metrics.record(self.progress.step, evaluation.record(scores))
        self.timeline.spent("productive")

    def _sample(self) -> str:
        """A text by the model as it is now."""
        self.watch.mark(self.progress.step, "sample")
        text = evaluation.text_sample(self.model, self.source.domains[0], self.config, self.collectives)
        if text:
            self.metrics.record(self.progress.step, {"sample": text})
        self.timeline.spent("productive")
        return text

    def _save(self, step: int) -> None:
        if self.progress.saved == step:
            return
        self.watch.mark(step, "save")
        self.reader.settle()  # what was learnt from a damaged shard is not kept
        if self.schedule is not None:
            self.schedule.began()
        self.runtime.checkpoints.save(step, training_state(self.model, self.optimizer), self._extra(step))
        self.progress.saved = step
        seconds = self.timeline.spent("save_stall")
        self._event("save", step=step, stall_seconds=round(seconds, 4))

    def _save_for_good(self) -> None:
        """The last save: the run is not over before it is committed, or has failed too often."""
        checkpoints = self.runtime.checkpoints
        while True:
            self._save(self.progress.step)
            checkpoints.wait()
            self.timeline.spent("save_stall")
            if not checkpoints.saves().failed:
                return
            self.progress.saved = -1
            self.runtime.limit.pause(self.config.checkpoint.retry_seconds)

    def _keep(self, step: int) -> None:
        """Where a recovery finds it."""
        self.watch.mark(step, "keep")
        self.reader.settle()  # as for a save; it waits only when a shard was just opened
        owed = self.schedule is not None and (self.schedule.owed or self.runtime.checkpoints.saves().busy)
        extra = {**self._extra(step), "save_owed": owed}
        self.runtime.checkpoints.keep(step, training_state(self.model, self.optimizer), extra)
        self.timeline.spent("save_stall")

    def _is_safe(self, step: int) -> bool:
        """Whether all that was kept of `step` outlives any one node."""
        unsafe = torch.tensor([float(not self.runtime.checkpoints.is_safe(step))], dtype=torch.float64)
        return not self.collectives.sum(unsafe).item()

    def _extra(self, step: int) -> dict[str, Any]:
        """What goes with the tensors of a checkpoint."""
        progress = self.progress
        return {
            "step": step, "position": self.positions.end(step), "tokens": progress.tokens,
            "loss": progress.loss, "guard": self.guard.state(),
            "validation_loss": progress.validation_loss if progress.validated == step else None,
            "passed_over": [list(window) for window in self.positions.windows],
            "loss_scale": self.loss_scale.state() if self.loss_scale is not None else None, **self.constant,
            "unwritten": self.record.unwritten()}

    def _make_way(self, step: int) -> None:
        """A planned resize or drain: commit, and end this generation."""
        self.watch.mark(step, "hold")
        if self.progress.saved == step:
            self.runtime.checkpoints.wait()
        else:  # what is under way is older than what memory holds: the next generation begins it anew
            self.runtime.checkpoints.let_go()
        self.timeline.spent("save_stall")
        if self.progress.saved == step and self.runtime.checkpoints.saves().failed:
            self.progress.saved = -1
            return  # nothing is given up that is not kept: the wish is heard again at the next step
        self.runtime.control.hold(step)
        self.timeline.spent("idle")

    def finish(self) -> TrainResult:
        """Validation loss, text sample, result.json."""
        self._evaluate()
        sample = self._sample()
        self._save_for_good()
        result = TrainResult(
            steps=self.progress.step, tokens=self.progress.tokens, loss=self.progress.loss,
            validation_loss=self.progress.validation_loss, sample=sample,
            seconds=time.time() - self.record.started(), run_uri=self.config.run_uri)
        self.metrics.finish()
        if self.runtime.rank == 0:
            self.record.flush()
            self.record.write_result(result)
        self._event("finish", step=result.steps, loss=result.loss, validation_loss=result.validation_loss)
        return result

    def _event(self, kind: str, **detail: Any) -> None:
        if self.runtime.rank == 0:
            self.runtime.control.event(kind, **detail)

    def close(self) -> None:
        """Let go of threads and buffered lines."""
        self.reader.close()
        self.metrics.close()
        self.record.close()
