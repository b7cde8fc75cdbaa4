"""One worker's share of a run: what the loop and its helpers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidewheel.models.noise import EmbeddingNoise
from tidewheel.shards.loader import Loader
from tidewheel.shards.source import Source, SourceReader
from tidewheel.train import checks, parallel
from tidewheel.train.averages import Averages
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.batches import BatchReader, Noise
from tidewheel.train.collectives import Collectives
from tidewheel.train.compile import use_cache
from tidewheel.train.config import TrainConfig
from tidewheel.train.guards.hang import Watch
from tidewheel.train.memory.host import keep_freed_memory
from tidewheel.train.metrics.waits import Waits, waits_on
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.optim.overlapped import overlap
from tidewheel.train.outer_exchange import OuterExchange
from tidewheel.train.parallel import ParallelModel, teacher
from tidewheel.train.positions import Positions, Window
from tidewheel.train.precision import LossScale
from tidewheel.train.rates import Rates
from tidewheel.train.record import RunRecord
from tidewheel.train.run import Run
from tidewheel.train.run_state import Progress
from tidewheel.train.runtime import AVERAGE, COMPRESSION, OUTER, Runtime, read_again
from tidewheel.train.storage_wait import StorageWait
from tidewheel.train.timeline import Category, Timeline


@dataclass
class Training:
    """One worker's share of a run in one generation."""

    config: TrainConfig
    runtime: Runtime
    timeline: Timeline
    watch: Watch
    retry: StorageWait
    collectives: Collectives
    source: Source
    model: ParallelModel
    optimizer: ModelOptimizer
    loss_scale: LossScale | None
    reader: BatchReader
    record: RunRecord
    positions: Positions
    progress: Progress
    rates: Rates
    averages: Averages
    waits: Waits
    """Measures how long steps wait for other workers."""
    outer: OuterExchange | None = None
    """Meets the other groups of the run; None: there are none."""
    base: dict[str, Any] | None = None
    """Of an adapter's run: URI, hash and vocabulary size of the frozen model, which checkpoints name."""
    teacher: dict[str, Any] | None = None
    """Of distillation from a live teacher: its URI and hash, which checkpoints name."""

    @classmethod
    def open(cls, run: Run, runtime: Runtime, timeline: Timeline, watch: Watch, retry: StorageWait) -> Training:
        """Open the data and build the model, whose values are set later.

        Args:
            run: the open run.
            runtime: this worker's rank, device and services.
            timeline: the worker's ledger.
            watch: notices hangs.
            retry: waits for storage.

        Raises:
            ValueError: the run has other groups, and `runtime` has nothing to meet them with.
        """
        config = run.config
        source, _ = run.data()
        device = torch.device(runtime.device)
        if device.type == "cpu":
            torch.set_num_threads(max(1, int(config.elastic.cpus_per_worker)))
            keep_freed_memory()
        if config.compile:
            use_cache(config.compile_cache)
        collectives = Collectives(runtime)
        model = parallel.build(config, config.model.vocabulary_size or source.manifest.vocabulary_size, runtime)
        if config.metrics.loss_by_source:
            model.collect_row_losses()
        model.before = teacher.build(config, model, source.manifest, runtime) or model.before
        positions = Positions(BatchSizes.of(config.batch, source.manifest.sequence_length),
                              share=(0, 1) if config.outer is None else config.outer.share)
        cache = Path(config.data.cache) if config.data.cache else None
        reading = SourceReader(source, cache=cache, verify=config.data.verify,
                               on_damage=partial(read_again, runtime.control), parts=config.objective.parts,
                               reference=config.data.reference, teacher=config.data.teacher)
        reader = BatchReader(Loader(reading, prefetch=0), config.batch, positions, model.share, device=device,
                             steps=config.steps, ahead=config.data.prefetch, limit=runtime.limit,
                             one_shape=config.parallel.pipeline > 1, noise=noise_of(config),
                             by_source=config.metrics.loss_by_source)
        optimizer = build_optimizer(model, config.optimizer)
        if config.memory.optimizer_disk:
            optimizer.move_to_disk(Path(config.memory.optimizer_disk))
        if config.parallel.overlap_update:
            overlap(optimizer, model.data)
        waits = waits_on(device, runtime.world_size)
        model.measure(waits)
        training = cls(config=config, runtime=runtime, timeline=timeline, watch=watch, retry=retry,
                   collectives=collectives, source=source, model=model,
                   optimizer=optimizer,
                   loss_scale=LossScale() if config.precision == "fp16" else None, reader=reader,
                   record=RunRecord(run.store, runtime.generation, runtime.history),
                   positions=positions, progress=Progress(),
                   rates=Rates(config, source.manifest.sequence_length),
                   averages=Averages(config, optimizer, model), waits=waits)
        if config.outer is not None:
            if runtime.outer is None:
                raise ValueError("a run with outer needs Runtime.outer, such as tidewheel.outer.exchange.Exchange")
            training.outer = runtime.outer(training)
        return training

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes."""
        return self.runtime.rank == 0

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return torch.device(self.runtime.device)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding."""
        return self.config.model.vocabulary_size or self.source.manifest.vocabulary_size

    @property
    def sources(self) -> list[str]:
        """Names of the domains whose losses are reported; [] if none are."""
        return [domain.name for domain in self.source.domains] if self.config.metrics.loss_by_source else []

    def state(self) -> dict[str, Any]:
        """Return the tensors of the model, the optimizer, the averages and the compression of gradients."""
        others = {AVERAGE: self.averages.state(), COMPRESSION: self.model.compression_state(),
                  OUTER: {} if self.outer is None else self.outer.tensors()}
        return {**training_state(self.model, self.optimizer), **{name: held for name, held in others.items() if held}}

    def event(self, kind: str, **detail: Any) -> None:
        """Record an event of the run, on rank 0."""
        if self.leads:
            self.runtime.control.event(kind, **detail)

    def spent_on(self, step: int) -> Category:
        """Return the ledger's category for a step's time."""
        return "redone" if step <= self.progress.recorded else "productive"

    def pass_over(self, windows: Sequence[Window]) -> None:
        """Take only positions outside `windows` from now on.

        Raises:
            ConfigError: the mixture now ends before the run's last step.
        """
        self.positions = Positions(self.positions.sizes, windows, self.positions.share)
        checks.still_reaches(self.config, self.source, self.positions)
        self.reader.start_over(self.positions)


def noise_of(config: TrainConfig) -> Noise | None:
    """Return what draws the noise on embeddings, None if there is none."""
    if not config.neftune_alpha:
        return None
    return partial(EmbeddingNoise.of, alpha=config.neftune_alpha, dim=config.model.dim, seed=config.seed)
