"""Compare pipelines that never empty with synchronous ones: staleness, stashed weights, waiting, speed and loss.

    nice -n 10 python -m tests.benchmarks.stale_pipelines [--pipeline 2] [--rounds 5] [--skip-loss]
        [--steps 200] [--seeds 2] [--output FOLDER] [--data FOLDER]

Each stage is a process with one thread; stages exchange activations and gradients by gloo. A stage's work is that of a
real decoder, and all schedules take turns in the same processes on the same batches. `waited` is the share of the time
in which a stage waits for another, averaged over stages. `delay` is counted from the weights that each micro-batch's
passes had and those that its gradient updated. With more stages than cores, or beside other work, stages wait for a
core as well, so that measured speed and waiting mean little. So the passes and updates are also measured in CPU time,
and replayed in the order of each schedule as if each stage had a core of its own and sending took no time: `replayed`.

Losses are those of the Llama of `tests.benchmarks.families` with untied embeddings after `--steps` batches of 4 rows of
../shared/corpus, in real runs of the loop with 2 stages; no gradient is clipped. A run that is in the output folder is
not trained again. The exit code is 1 if a delay is not that of the formula, if a stage keeps more weights than it says,
if a stale schedule of the whole batch learns better than the synchronous one by more than the seeds' scatter, or if
PipeDream-2BW is not faster than 1F1B when replayed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from tests.benchmarks import families
from tests.benchmarks.equivalence import checkpoints
from tests.ranks import on_ranks
from tests.unit.contrib.stale_pipeline import NEEDED, PIPEDREAM, TWO_BUFFERS, find_contrib
from tidewheel import storage
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.decoder import next_tokens
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.record import read_result
from tidewheel.train.runtime import Runtime
from tidewheel.train.stage_steps import StageSteps
from tidewheel.train.step import MicroBatch, train_step

VOCABULARY, LENGTH, MICRO_BATCHES, STEPS_A_ROUND, REPLAYED_STEPS = 512, 128, 4, 3, 12
MODEL = {"dim": 128, "num_layers": 6, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 384, "tie_embeddings": False}
SPEED: dict[str, dict[str, Any] | None] = {
    "1F1B, synchronous": None, "PipeDream, an update a micro-batch": {"kind": PIPEDREAM},
    "PipeDream, an update a step": {"kind": PIPEDREAM, "update_every": MICRO_BATCHES}, "2BW": {"kind": TWO_BUFFERS}}
LOSSES: dict[str, tuple[dict[str, Any] | None, int]] = {
    "synchronous": (None, 4), "PipeDream, an update a step": ({"kind": PIPEDREAM, "update_every": 4}, 4),
    "2BW": ({"kind": TWO_BUFFERS}, 4), "synchronous, a row a step": (None, 1),
    "PipeDream, an update a row": ({"kind": PIPEDREAM}, 4)}
"""Schedules, and rows of a step. The last two make four times as many updates."""


Times = tuple[float, float, float]
"""Seconds of a stage's forward pass, backward pass and update."""


def replay(stages: Sequence[Times], micro_batches: int, steps: int, every: int | None) -> tuple[float, float]:
    """Return the seconds of a step in which passes take given times, and the share of them in which stages are idle.

    Args:
        stages: times of each stage.
        micro_batches: of a step.
        steps: to compute; the first half does not count unless there is only one.
        every: micro-batches of an update without flush; None: 1F1B, whose updates wait for all stages.
    """
    queues = [_order(len(stages) - 1 - stage, micro_batches, steps, every) for stage in range(len(stages))]
    done: dict[tuple[str, int, int], float] = {}
    free, busy, ends = [0.0] * len(stages), [0.0] * len(stages), [[0.0] for _ in stages]
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue and all(need in done for need in _needs(*queue[0], stage, len(stages), micro_batches, every)):
                kind, index = queue.pop(0)
                needs = _needs(kind, index, stage, len(stages), micro_batches, every)
                began = max([free[stage], *(done[need] for need in needs)])
                length = stages[stage]["FBU".index(kind)]
                free[stage] = done[kind, stage, index] = began + length
                busy[stage] += length
                if kind == "U" and index % micro_batches == micro_batches - 1:
                    ends[stage].append(free[stage])
    first = steps // 2
    spent = max(column[-1] for column in ends) - max(column[first] for column in ends)
    seconds = spent / (steps - first)
    return seconds, 1 - sum(busy) / steps / (len(stages) * seconds)


def _order(ahead: int, micro_batches: int, steps: int, every: int | None) -> list[tuple[str, int]]:
    """Return a stage's work as (kind, index of the micro-batch over all steps); an update has that of its last one."""
    work: list[tuple[str, int]] = []
    period = micro_batches * steps if every else micro_batches  # the pipeline is empty after it
    for begin in range(0, micro_batches * steps, period):
        for index in range(begin, begin + period + ahead):
            work += [("F", index)] if index < begin + period else []
            back = index - ahead
            if back >= begin:
                number = back % micro_batches + 1
                ends = number == micro_batches or (every is not None and number % every == 0)
                work += [("B", back), *([("U", back)] if ends else [])]
    return work


def _needs(kind: str, index: int, stage: int, count: int, micro_batches: int,
           every: int | None) -> list[tuple[str, int, int]]:
    """Return the work of all stages that must be done before."""
    if kind == "F":
        return [("F", stage - 1, index)] if stage else []
    if kind == "B":
        return [("B", stage + 1, index)] if stage + 1 < count else []
    return [] if every else [("B", other, index) for other in range(count)]


def batches(count: int) -> list[list[MicroBatch]]:
    """Return random micro-batches of 2 rows for some steps."""
    generator = torch.Generator().manual_seed(1)
    made: list[list[MicroBatch]] = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (MICRO_BATCHES, 2, LENGTH), generator=generator)
        positions, segments = torch.arange(LENGTH).expand(2, -1), torch.zeros(2, LENGTH, dtype=torch.int64)
        targets = [next_tokens(rows, segments) for rows in tokens]
        made.append([MicroBatch(rows, positions, segments, wanted, 0, rows.numel(), int((wanted >= 0).sum()))
                     for rows, wanted in zip(tokens, targets)])
    return made


class Row:
    """One schedule on this rank."""

    def __init__(self, schedule: dict[str, Any] | None) -> None:
        pipeline = dist.get_world_size()
        config = build(TrainConfig, {
            "model": MODEL, "parallel": {"pipeline": pipeline}, "elastic": {"max_workers": pipeline}, **NEEDED,
            "batch": {"global_sequences": 2 * MICRO_BATCHES, "micro_sequences": 2, "virtual_ranks": 1},
            "stage_schedule": schedule})
        runtime = Runtime(dist.get_rank(), pipeline)
        self._model = parallel.build(config, VOCABULARY, runtime)
        parallel.init_weights(self._model, 1)
        self._optimizer = build_optimizer(self._model, config.optimizer)
        self._collectives = Collectives(runtime)
        self._stages = None
        if schedule is not None:
            self._stages = StageSteps(config, self._model, self._optimizer, self._collectives, None)
        self._optimizer.set_learning_rate(1e-3)
        self._step = 0
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.delays: list[int] = []
        self.times: Times = (0.0, 0.0, 0.0)
        self.bytes = sum(value.nbytes for value in self._model.parameters())
        self.held = self.bytes

    def round(self, data: list[list[MicroBatch]]) -> None:
        """Take some steps, whose first ones fill the pipeline and do not count."""
        if self._stages is None:
            self._synchronous(data)
        else:
            self._unflushed(data)

    def _synchronous(self, data: list[list[MicroBatch]]) -> None:
        waited, plain = [0.0], schedules._wait_batch_p2p

        def timed(work: Any) -> None:
            began = time.perf_counter()
            plain(work)
            waited[0] += time.perf_counter() - began

        schedules._wait_batch_p2p = timed
        try:
            for number, micros in enumerate(data):
                if number == 1:
                    dist.barrier()
                    began, waited[0] = time.perf_counter(), 0.0
                train_step(self._model, self._optimizer, micros, self._collectives, virtual_ranks=1)
        finally:
            schedules._wait_batch_p2p = plain
        self._note(time.perf_counter() - began, waited[0], len(data) - 1)

    def _unflushed(self, data: list[list[MicroBatch]]) -> None:
        assert self._stages is not None
        passes: Any = self._stages.passes
        pending = None
        for number, micros in enumerate(data):
            self._step += 1
            started = self._stages.start(self._step, micros)
            if pending is not None:
                pending.result()
            if number == 0:
                began, waited = time.perf_counter(), passes.figures.waited
            pending = started
        spent = time.perf_counter() - began
        self._note(spent, passes.figures.waited - waited, len(data) - 1)
        assert pending is not None
        pending.result()
        figures = passes.figures
        self.times = (statistics.median(figures.forward), statistics.median(figures.backward),
                      statistics.median(figures.update))
        self.delays, self.held = passes.figures.delays, passes.versions.most_bytes

    def _note(self, seconds: float, waited: float, steps: int) -> None:
        self.seconds.append(seconds / steps)
        self.waited.append(waited / seconds)


def measure(rounds: int, file: str) -> None:
    """Measure all schedules in turn on every rank; rank 0 writes what they found."""
    find_contrib()
    torch.set_num_threads(1)
    made = {name: Row(schedule) for name, schedule in SPEED.items()}
    data = batches(STEPS_A_ROUND + 1)
    for _ in range(rounds + 1):
        for row in made.values():
            dist.barrier()
            row.round(data)
    mine = {name: {"seconds": row.seconds[1:], "waited": row.waited[1:], "delay": max(row.delays, default=0),
                   "versions": row.held / row.bytes, "held": row.held, "times": row.times}
            for name, row in made.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(gathered))


def speed(pipeline: int, rounds: int) -> list[str]:
    """Print the table of staleness, weights, waiting and speed; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/measured.json"
        on_ranks(pipeline, measure, rounds, file)
        ranks = json.loads(Path(file).read_text())
    rows, wrong = [], []
    base = [max(rank["1F1B, synchronous"]["seconds"][turn] for rank in ranks) for turn in range(rounds)]
    times = [rank["2BW"]["times"] for rank in ranks]
    synchronous, _ = replay(times, MICRO_BATCHES, REPLAYED_STEPS, None)
    faster = 0.0
    for name, schedule in SPEED.items():
        own = [rank[name] for rank in ranks]
        slowest = [max(rank["seconds"][turn] for rank in own) for turn in range(rounds)]
        ratio = statistics.median(there / here for there, here in zip(base, slowest))
        every = 0 if schedule is None else schedule.get("update_every", 1 if schedule["kind"] == PIPEDREAM else 4)
        own_times = times if schedule is None else [rank["times"] for rank in own]
        replayed, idle = replay(own_times, MICRO_BATCHES, REPLAYED_STEPS, every or None)
        faster = synchronous / replayed if name == "2BW" else faster
        waited = statistics.median(statistics.mean(rank["waited"][turn] for rank in own) for turn in range(rounds))
        delays = [rank["delay"] for rank in own]
        rows.append({"schedule": name, "delay of each stage": " ".join(map(str, delays)),
                     "versions of weights": " ".join(f"{rank['versions']:.0f}" for rank in own),
                     "weights, MB": " ".join(f"{rank['held'] / 1e6:.1f}" for rank in own), "waited": f"{waited:.0%}",
                     "seconds a step": f"{statistics.median(slowest):.3f}", "times as fast": f"{ratio:.2f}",
                     "idle, replayed": f"{idle:.0%}", "times as fast, replayed": f"{synchronous / replayed:.2f}"})
        every = 0 if name == "2BW" else every
        formula = [-(-(pipeline - 1 - stage) // every) if every else int(schedule is not None)
                   for stage in range(pipeline)]
        wrong += [f"{name}: delays {delays}, not {formula}"] * (delays != formula)
        wrong += [f"{name}: stage {stage} keeps {rank['versions']:.2f} versions" for stage, rank in enumerate(own)
                  if round(rank["versions"], 3) != 1 + formula[stage]]
    print_table(rows, title=f"{pipeline} stages, {MICRO_BATCHES} micro-batches a step, {rounds} rounds")
    print("CPU milliseconds of forward pass, backward pass and update of each stage: "
          + "; ".join(", ".join(f"{1e3 * each:.1f}" for each in stage) for stage in times))
    wrong += [f"2BW is {faster:.2f} times as fast as 1F1B when replayed"] * (faster <= 1)
    return wrong


def task(folder: Path, data: str, name: str, seed: int, steps: int) -> TrainConfig:
    """Return the run of a row with a seed."""
    schedule, rows = LOSSES[name]
    base = families.settings(families.shapes()["llama"], "llama", data, str(folder), steps).canonical()
    run = "".join(letter if letter.isalnum() else "-" for letter in name)
    return build(TrainConfig, {
        **base, "run": {"id": f"{run}-{seed}", "uri": str(folder / f"runs-{steps}")}, "seed": seed,
        "steps": steps * 4 // rows, "model": {**base["model"], "tie_embeddings": False},
        "optimizer": {**base["optimizer"], "clip_norm": 0}, "guards": {"non_finite": "stop"},
        "schedule": {"warmup_steps": 20 * 4 // rows}, "parallel": {"pipeline": 2 if rows > 1 else 1},
        "batch": {"global_sequences": rows, "micro_sequences": 1, "virtual_ranks": 1},
        "elastic": {"min_workers": 1, "max_workers": 2 if rows > 1 else 1}, "stage_schedule": schedule})


def on_this_rank(config: TrainConfig) -> None:
    """Train on this rank of the pipeline."""
    find_contrib()
    train(config, Runtime(dist.get_rank(), dist.get_world_size(), checkpoints=checkpoints(config)))


def loss_of(config: TrainConfig) -> float:
    """Return the validation loss of a run, trained if it has not been."""
    store = storage.store(config.run_uri)
    if read_result(store) is None:
        if config.parallel.pipeline == 1:
            train(config, Runtime(checkpoints=checkpoints(config)))
        else:
            on_ranks(config.parallel.pipeline, on_this_rank, config)
    result = read_result(store)
    assert result is not None
    assert result.validation_loss is not None
    return result.validation_loss


def losses(folder: Path, data: str, steps: int, seeds: int) -> list[str]:
    """Print the losses at equal tokens; return what is wrong."""
    find_contrib()
    data = data or families.made_data(str(folder))
    rows, wrong = [], []
    base: list[float] = []
    for name, (schedule, of_step) in LOSSES.items():
        own = [loss_of(task(folder, data, name, seed, steps)) for seed in range(1, seeds + 1)]
        base = own if schedule is None else base
        over = [loss - other for loss, other in zip(own, base)]
        scatter = statistics.stdev(over) if len(over) > 1 else 0.0
        updates = steps * 4 // of_step if schedule is None or "row" not in name else steps * 4
        rows.append({"pipeline of 2 stages": name, "updates": updates, "loss": f"{statistics.mean(own):.3f}",
                     "above synchronous": "" if schedule is None else f"{statistics.mean(over):+.3f}",
                     "scatter": "" if schedule is None else f"{scatter:.3f}"})
        wrong += [f"{name}: better than synchronous"] * (statistics.mean(over) < -2 * scatter - 0.01)
    print_table(rows, title=f"{steps * 4 * families.LENGTH:,} tokens, {seeds} seeds")
    return wrong


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="0: leave out speed and staleness")
    parser.add_argument("--skip-loss", action="store_true", help="leave out the losses")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", default="")
    parser.add_argument("--data", default="", help="shards that `tests.benchmarks.families` has made")
    options = parser.parse_args()
    wrong = speed(options.pipeline, options.rounds) if options.rounds else []
    if not options.skip_loss:
        folder = Path(options.output or tempfile.mkdtemp(prefix="stale-pipelines-"))
        wrong += losses(folder, options.data, options.steps, options.seeds)
    print("\n".join(wrong) or "all delays are those of the formula")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
