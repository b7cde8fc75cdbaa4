"""Compare every layout with a single-process run: the losses and the parameters must be the same.

    python -m tests.benchmarks.equivalence [--steps 20] [--only TEXT] [--list]

Each row is a whole training run of the debug model in fp32 on CPU (gloo, up to 8 processes) from the same shards, with
the loop, the loader and the checkpoints of users. Its last checkpoint is then loaded into a single process. `loss` is
the largest relative difference of a step's loss and `parameter` the largest difference of an element from a single
process with the same recipe. `validation` is the relative difference of the final validation loss. In reproducible
mode all three must be 0. The exit code is 1 when a bound is exceeded. `--rounding` trains each recipe in a single
process with other micro-batches instead, which changes nothing but the rounding of sums.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.ranks import on_ranks
from tests.unit.train.helpers import write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models import families
from tidewheel.train import compressions, parallel
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel.stages import SCHEDULES
from tidewheel.train.record import read_result
from tidewheel.train.runtime import Runtime

LOSS_BOUND, PARAMETER_BOUND = 1e-5, 1e-4
LENGTH, SEQUENCES = 32, 16
AMPLIFIED = 3.0
ROUNDED = ("batch.micro_sequences=4",)
"""Micro-batches of 4 instead of 2 sequences, which change nothing but the rounding of sums."""
AT_ONCE = 6
"""Rows for each process: every row leaves process groups behind, whose threads slow down the next rows."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a number of ranks with a layout, and the settings shared with the single process."""

    name: str
    ranks: int
    layout: tuple[str, ...]
    """Settings that must not change the result."""
    recipe: tuple[str, ...] = ()
    """Settings that may change the result; the single process has them too."""
    exact: bool = False
    """Whether the result must have the same bits, as in reproducible mode."""

    amplifies: bool = False
    """Whether the recipe amplifies rounding: its bounds are at least `AMPLIFIED` times what rounding alone changes."""

    @property
    def key(self) -> str:
        """Return a name for a folder."""
        return "".join(c if c.isalnum() else "-" for c in self.name)


DEEP = ("model.num_layers=4",)
METHODS = ("all_gather", "all_to_all", "ring")
BLOCKWISE = "model.attention=blockwise"
CONTEXT_ROWS: list[Row] = [
    *(Row(f"CP 2, {method}, blockwise", 2, (
        "parallel.context=2", f"parallel.context_method={method}", BLOCKWISE)) for method in METHODS),
    *(Row(f"CP 4, {method}", 4, ("parallel.context=4", f"parallel.context_method={method}"))
      for method in METHODS[1:]),
    *(Row(f"CP 2, {method}, activations {kind}", 2, (
        "parallel.context=2", f"parallel.context_method={method}", f"memory.activation_checkpointing={kind}"))
      for method in METHODS[1:] for kind in ("full", "selective")),
    *(Row(f"CP 2, {method} x {data} 2", 4, (
        "parallel.context=2", f"parallel.context_method={method}", f"parallel.data={data}"))
      for method in METHODS[1:] for data in ("ddp", "zero3")),
    *(Row(f"TP 2 x CP 2, {method}", 4, ("parallel.tensor=2", "parallel.context=2", f"parallel.context_method={method}"),
          ("model.num_kv_heads=4",)) for method in METHODS[1:]),
    *(Row(f"PP 2 x CP 2, {method}", 4, ("parallel.pipeline=2", "parallel.context=2",
                                        f"parallel.context_method={method}")) for method in METHODS[1:]),
    Row("CP 2, zigzag", 2, ("parallel.context=2", "parallel.context_balance=zigzag")),
    Row("CP 2, ring, compiled", 2, ("parallel.context=2", "parallel.context_method=ring", "compile=true")),
]
"""Methods of context parallelism beside the default."""


def family_rows() -> list[Row]:
    """Return the rows of every model family, of its presets that begin with "debug".

    The default family's is Qwen 3, which all other rows train; its rows here are Llama, without norms on queries.
    """
    layouts = {"DDP 2": "parallel.data=ddp", "ZeRO-3 2": "parallel.data=zero3", "TP 2": "parallel.tensor=2",
               "CP 2": "parallel.context=2", "PP 2": "parallel.pipeline=2"}
    rows: list[Row] = []
    for family in families.KIND.built_in():
        for preset in families.KIND.find(family).PRESETS:
            if not preset.startswith("debug"):
                continue
            changed = ", qk_norm: false" if family == families.DEFAULT else ""
            model, name = f"model={{kind: {family}, preset: {preset}{changed}}}", f"{family} {preset}"
            rows += [Row(f"{name}, {layout}", 2, (setting,), (model,)) for layout, setting in layouts.items()]
            rows += [Row(f"{name}, reproducible, {ranks} ranks", ranks, (), (model, "reproducible=true"), exact=True)
                     for ranks in (2, 4)]
    return rows


ROWS: list[Row] = [
    Row("single process, again", 1, ()),
    Row("DDP, 2 ranks", 2, ("parallel.data=ddp",)),
    Row("DDP, 4 ranks", 4, ("parallel.data=ddp",)),
    Row("ZeRO-1, 2 ranks", 2, ("parallel.data=zero1",)),
    Row("ZeRO-1, 4 ranks", 4, ("parallel.data=zero1",)),
    Row("ZeRO-2, 2 ranks", 2, ("parallel.data=zero2",)),
    Row("ZeRO-2, 4 ranks", 4, ("parallel.data=zero2",)),
    Row("ZeRO-3, 2 ranks", 2, ("parallel.data=zero3",)),
    Row("ZeRO-3, 4 ranks", 4, ("parallel.data=zero3",)),
    Row("HSDP 2 x 2", 4, ("parallel.data=zero3", "parallel.replicate=2")),
    Row("HSDP 2 x 2, reduced each micro-batch", 4, ("parallel.data=zero3", "parallel.replicate=2",
                                                    "parallel.reduce=micro_batch")),
    Row("ZeRO-3, offloaded, 2 ranks", 2, ("parallel.data=zero3", "parallel.offload=true")),
    Row("ZeRO-3, no accumulation, 4 ranks", 4, ("parallel.data=zero3",), ("batch.micro_sequences=4",)),
    Row("DDP, 8 micro-batches, 2 ranks", 2, ("parallel.data=ddp",), ("batch.micro_sequences=1",)),
    Row("ZeRO-3, untied embeddings, 4 ranks", 4, ("parallel.data=zero3",), ("model.tie_embeddings=false",)),
    Row("ZeRO-1, 4 layers, 4 ranks", 4, ("parallel.data=zero1",), DEEP),
    *(Row(f"ZeRO-3, activations {kind}, 2 ranks", 2, ("parallel.data=zero3", f"memory.activation_checkpointing={kind}"))
      for kind in ("full", "selective", "every_nth", "offload")),
    Row("DDP, activations full, 4 ranks", 4, ("parallel.data=ddp", "memory.activation_checkpointing=full")),
    Row("PP 2, 1f1b, activations full", 2, ("parallel.pipeline=2", "memory.activation_checkpointing=full")),
    Row("ZeRO-3, loss in chunks, 4 ranks", 4, ("parallel.data=zero3", "loss.chunk_tokens=24")),
    Row("DDP, loss in chunks, z-loss, 2 ranks", 2, ("parallel.data=ddp", "loss.chunk_tokens=24"), (
        "loss.z_loss=1e-3",)),
    Row("ZeRO-2, loss in chunks, untied, activations full, 2 ranks", 2, (
        "parallel.data=zero2", "loss.chunk_tokens=24", "memory.activation_checkpointing=full"),
        ("model.tie_embeddings=false",)),
    Row("ZeRO-3, compiled, 2 ranks", 2, ("parallel.data=zero3", "compile=true")),
    Row("ZeRO-3, compiled, activations selective, 2 ranks", 2, (
        "parallel.data=zero3", "compile=true", "memory.activation_checkpointing=selective")),
    Row("DDP, compiled, 2 ranks", 2, ("parallel.data=ddp", "compile=true")),
    *(Row(f"PP 2, {schedule}", 2, ("parallel.pipeline=2", f"parallel.pipeline_schedule={schedule}"))
      for schedule in SCHEDULES),
    *(Row(f"PP 2, {schedule} x ZeRO-2, 2 ranks", 4, ("parallel.pipeline=2", f"parallel.pipeline_schedule={schedule}",
                                                  "parallel.data=zero2")) for schedule in SCHEDULES),
    Row("PP 2 x ZeRO-3, 2 ranks", 4, ("parallel.pipeline=2", "parallel.data=zero3")),
    Row("PP 2 x DDP, 2 ranks", 4, ("parallel.pipeline=2", "parallel.data=ddp")),
    Row("PP 2 x ZeRO-1, 2 ranks", 4, ("parallel.pipeline=2", "parallel.data=zero1")),
    Row("PP 2, untied embeddings", 2, ("parallel.pipeline=2",), ("model.tie_embeddings=false",)),
    Row("PP 4, 4 layers", 4, ("parallel.pipeline=4",), DEEP),
    Row("Adafactor, ZeRO-3, 4 ranks", 4, ("parallel.data=zero3",), ("optimizer.kind=adafactor",)),
    Row("Lion, HSDP 2 x 2", 4, ("parallel.data=zero3", "parallel.replicate=2"), ("optimizer.kind=lion",)),
    Row("Batch ramp, ZeRO-3, 4 ranks", 4, ("parallel.data=zero3",),
        (f"batch.ramp=[{{sequences: 8, tokens: {40 * LENGTH}}}]",)),
    Row("TP 2", 2, ("parallel.tensor=2",)),
    Row("TP 2, untied embeddings", 2, ("parallel.tensor=2",), ("model.tie_embeddings=false",)),
    Row("TP 2, activations full", 2, ("parallel.tensor=2", "memory.activation_checkpointing=full")),
    Row("TP 2 x DDP 2", 4, ("parallel.tensor=2", "parallel.data=ddp")),
    Row("TP 2 x ZeRO-1 2", 4, ("parallel.tensor=2", "parallel.data=zero1")),
    Row("TP 2 x FSDP 2", 4, ("parallel.tensor=2", "parallel.data=zero3")),
    Row("TP 4, 4 key heads", 4, ("parallel.tensor=4",), ("model.num_kv_heads=4",)),
    Row("CP 2", 2, ("parallel.context=2",)),
    Row("CP 2, activations selective", 2, ("parallel.context=2", "memory.activation_checkpointing=selective")),
    Row("CP 2 x DDP 2", 4, ("parallel.context=2", "parallel.data=ddp")),
    Row("CP 2 x ZeRO-1 2", 4, ("parallel.context=2", "parallel.data=zero1")),
    Row("CP 2 x FSDP 2", 4, ("parallel.context=2", "parallel.data=zero3")),
    Row("CP 2 x HSDP 2", 4, ("parallel.context=2", "parallel.replicate=2")),
    Row("CP 4, untied embeddings", 4, ("parallel.context=4",), ("model.tie_embeddings=false",)),
    *CONTEXT_ROWS,
    Row("TP 2 x CP 2", 4, ("parallel.tensor=2", "parallel.context=2")),
    Row("PP 2 x TP 2", 4, ("parallel.pipeline=2", "parallel.tensor=2")),
    *(Row(f"PP 2, {schedule} x TP 2", 4, ("parallel.pipeline=2", f"parallel.pipeline_schedule={schedule}",
                                        "parallel.tensor=2")) for schedule in SCHEDULES[1:]),
    Row("PP 2 x CP 2", 4, ("parallel.pipeline=2", "parallel.context=2")),
    *(Row(f"3-D: TP 2 x PP 2 x {data} 2", 8, ("parallel.tensor=2", "parallel.pipeline=2", f"parallel.data={data}"))
      for data in ("ddp", "zero1", "zero2")),
    *(Row(f"3-D: TP 2 x CP 2 x {data} 2", 8, ("parallel.tensor=2", "parallel.context=2", f"parallel.data={data}"))
      for data in ("ddp", "zero1", "zero3")),
    Row("3-D: PP 2 x CP 2 x zero2 2", 8, ("parallel.pipeline=2", "parallel.context=2", "parallel.data=zero2")),
    Row("3-D: TP 2 x PP 2 x CP 2", 8, ("parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2")),
    *family_rows(),
]
MIXTURE = ("model.kind=mixtral", "model.balancing=bias", "model.router_z_loss=1e-3")
AUXILIARY = ("model.kind=mixtral", "model.balancing=auxiliary", "model.shared_experts=1",
             "model.first_dense_layers=1")
EXPERT_ROWS: list[Row] = [
    *(Row(f"Experts, {name}", 2, layout, MIXTURE) for name, layout in (
        ("DDP 2", ("parallel.data=ddp",)), ("ZeRO-3 2", ("parallel.data=zero3",)), ("TP 2", ("parallel.tensor=2",)),
        ("CP 2", ("parallel.context=2",)), ("PP 2", ("parallel.pipeline=2",)),
        ("EP 2", ("parallel.data=zero3", "parallel.expert=2")))),
    Row("Experts, EP 2, activations selective", 2, ("parallel.data=zero2", "parallel.expert=2",
                                                    "memory.activation_checkpointing=selective"), AUXILIARY),
    Row("Experts, EP 2, compiled", 2, ("parallel.data=zero3", "parallel.expert=2", "compile=true"), AUXILIARY),
    *(Row(f"Experts, EP 2 x ZeRO-3 2, {kind}", 4, ("parallel.data=zero3", "parallel.expert=2"),
          (*MIXTURE, f"optimizer.kind={kind}")) for kind in ("adafactor", "lion")),
    *(Row(f"Experts, {name}", 4, ("parallel.data=zero3", *layout), MIXTURE) for name, layout in (
        ("EP 4", ("parallel.expert=4",)), ("EP 2 x ZeRO-3 2", ("parallel.expert=2",)),
        ("EP 2 x HSDP 2", ("parallel.expert=2", "parallel.replicate=2")),
        ("EP 2 x TP 2", ("parallel.expert=2", "parallel.tensor=2")),
        ("EP 2 x CP 2", ("parallel.expert=2", "parallel.context=2")),
        ("EP 4 over CP 2", ("parallel.expert=4", "parallel.context=2")))),
    Row("Experts, GPT-OSS's with biases, EP 2 x TP 2", 4, ("parallel.data=zero3", "parallel.expert=2",
                                                           "parallel.tensor=2"), ("model.kind=gpt_oss",)),
    Row("Experts, DeepSeek-V3's, EP 2 x CP 2", 4, ("parallel.data=zero3", "parallel.expert=2", "parallel.context=2"),
        ("model.kind=deepseek_v3",)),
    Row("Experts, EP 2, offloaded", 2, ("parallel.data=zero3", "parallel.expert=2", "parallel.offload=true"), MIXTURE),
    Row("Experts, EP 2 x PP 2", 4, ("parallel.data=zero2", "parallel.expert=2", "parallel.pipeline=2"), MIXTURE),
    Row("Experts, EP 2 x PP 2, interleaved", 4, ("parallel.data=zero2", "parallel.expert=2", "parallel.pipeline=2",
        "parallel.pipeline_schedule=interleaved_1f1b", "memory.activation_checkpointing=full"), MIXTURE),
    Row("Experts, EP 2 x TP 2 x ZeRO-3 2, shared experts", 8, (
        "parallel.data=zero3", "parallel.expert=2", "parallel.tensor=2"), AUXILIARY),
]
DISK = Path(tempfile.gettempdir()) / "tidewheel-equivalence-disk"
OFFLOADED = ("parallel.data=zero3", "parallel.offload=true")
STATE_ON_DISK = (*OFFLOADED, f"memory.optimizer_disk={DISK}", "checkpoint.memory_tier.every_steps=0")
INPUTS_ON_DISK = ("memory.activation_checkpointing=offload", f"memory.activation_disk={DISK}")
EIGHT_BITS = ("optimizer.kind=adamw8bit",)
OFFLOAD_ROWS: list[Row] = [
    Row("ZeRO-3, offloaded, one worker", 1, OFFLOADED),
    *(Row(f"ZeRO-3, state on disk, {ranks} ranks", ranks, STATE_ON_DISK) for ranks in (1, 2)),
    *(Row(f"ZeRO-3, 8-bit moments, offloaded, {ranks} ranks", ranks, OFFLOADED, EIGHT_BITS) for ranks in (1, 2)),
    *(Row(f"Inputs on disk, {name}", 2, (*layout, *INPUTS_ON_DISK)) for name, layout in (
        ("DDP 2", ("parallel.data=ddp",)), ("ZeRO-3 2", ("parallel.data=zero3",)), ("TP 2", ("parallel.tensor=2",)),
        ("CP 2, ring", ("parallel.context=2", "parallel.context_method=ring")), ("PP 2", ("parallel.pipeline=2",)),
        ("ZeRO-3 2, compiled", ("parallel.data=zero3", "compile=true")), ("state on disk too", STATE_ON_DISK))),
    *(Row(f"Reproducible, {name}, {ranks} ranks", ranks, layout, ("reproducible=true",), exact=True)
      for name, layout in (("offloaded", OFFLOADED), ("state on disk", STATE_ON_DISK),
                           ("inputs on disk", INPUTS_ON_DISK)) for ranks in (1, 2)),
]
"""Host memory and disk."""
COMPRESSION_ROWS: list[Row] = [
    Row(f"Reproducible, compression {kind}, {data} {ranks}", ranks, (f"parallel.data={data}",),
        ("reproducible=true", "parallel.data=ddp", f"compression={{kind: {kind}, smallest: 256}}"), exact=True)
    for kind in compressions.KIND.built_in() for data, ranks in (("ddp", 2), ("zero1", 4))]
"""Each virtual rank sends what it would send alone."""
CONTRIB = str(Path(__file__).parents[2] / "contrib/optimizers")
if CONTRIB not in sys.path:
    sys.path.append(CONTRIB)  # spawned ranks import this module too
SEPARATE = ("adagrad:Adagrad", "lamb:LAMB", "schedule_free:ScheduleFree", "shampoo:Shampoo", "soap:SOAP",
            "sophia:SophiaG")
AMPLIFYING = ("tidewheel_optimizers.shampoo:Shampoo", "tidewheel_optimizers.soap:SOAP")
"""Optimizers that make much of the last bit of a gradient, by roots and eigenvectors of ill-conditioned matrices, and
that reproducible mode allows: there every bit must be equal. Muon's Newton-Schulz in bf16 does so too; its rows may
differ by three times as much as a single process does after a change of the rounding."""
OPTIMIZERS = ("sgd", "adam", "ademamix", "adamw8bit", *(f"tidewheel_optimizers.{name}" for name in SEPARATE))
OPTIMIZER_ROWS: list[Row] = [
    *(Row(f"Optimizer {kind.rpartition(':')[2]}, {data} {ranks}", ranks, (f"parallel.data={data}",),
          (f"optimizer.kind='{kind}'",))
      for kind in OPTIMIZERS if kind not in AMPLIFYING for data, ranks in (("zero1", 2), ("zero3", 4))),
    *(Row(f"Optimizer muon, {data} {ranks}", ranks, (f"parallel.data={data}",), ("optimizer.kind=muon",),
          amplifies=True)
      for data, ranks in (("zero1", 2), ("zero3", 4))),
    *(Row(f"Optimizer {kind.rpartition(':')[2]}, reproducible, {data} {ranks}", ranks, (f"parallel.data={data}",),
          (f"optimizer.kind='{kind}'", "reproducible=true"), exact=True)
      for kind in AMPLIFYING for data, ranks in (("zero1", 2), ("zero3", 4)))]
"""Adafactor and Lion are among the rows of layouts."""
ROWS += EXPERT_ROWS + OFFLOAD_ROWS + COMPRESSION_ROWS + OPTIMIZER_ROWS
"""Rows of the table, with 1, 2, 4 or 8 ranks. A layout that the configuration refuses is an error, not a missing
row."""


def settings(folder: Path, name: str, steps: int, overrides: Sequence[str]) -> TrainConfig:
    """Return the configuration of a run: the common settings of the rows with `overrides`."""
    values: dict[str, Any] = {
        "run": {"id": name, "uri": str(folder / "runs")}, "steps": steps, "seed": 1,
        "data": {"uri": str(folder / "shards"), "validation": str(folder / "validation"), "seed": 7},
        "model": {"preset": "debug"}, "optimizer": {"learning_rate": 3e-3, "clip_norm": 0.5},
        "schedule": {"warmup_steps": 3}, "evaluation": {"sample_tokens": 0},
        "batch": {"global_sequences": SEQUENCES, "micro_sequences": 2, "virtual_ranks": 4},
        "checkpoint": {"every_steps": 0, "asynchronous": False}, "elastic": {"min_workers": 1, "max_workers": 8}}
    return build(TrainConfig, values, overrides)


def rounded(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each recipe, trained in a single process in micro-batches of 4 instead of 2 sequences."""
    by_recipe = {tuple(key for key in row.recipe if key != "reproducible=true"): row for row in rows}
    return [Row(f"Rounding, {row.name}", 1, ROUNDED, recipe) for recipe, row in by_recipe.items()]


def prepare(folder: Path) -> None:
    """Write the shards that all rows read."""
    write_shards(folder / "shards", rows=40, length=LENGTH)
    write_shards(folder / "validation", shards=1, rows=11, seed=1, length=LENGTH)


def checkpoints(config: TrainConfig) -> CheckpointManager:
    """Return a run's checkpoint manager, which saves synchronously."""
    return CheckpointManager(storage.store(config.run_uri).child("checkpoints"), asynchronous=False)


def train_all(configs: Sequence[TrainConfig]) -> None:
    """Train the configurations one after the other; called on every rank."""
    distributed = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    for config in configs:
        began = time.time()
        train(config, Runtime(rank, ranks, checkpoints=checkpoints(config)))
        if rank == 0:
            storage.store(config.run_uri).write_json("seconds.json", time.time() - began)


def run(folder: Path, rows: Sequence[Row], steps: int) -> list[dict[str, Any]]:
    """Train the rows and their references, and return a row of differences for each."""
    prepare(folder)
    references = {row.recipe: settings(folder, f"reference-{index}", steps, row.recipe)
                  for index, row in enumerate(rows)}
    train_all(list(references.values()))
    amplified = {row.recipe: settings(folder, f"rounded-{index}", steps, (*row.recipe, *ROUNDED))
                 for index, row in enumerate(rows) if row.amplifies}
    train_all(list(amplified.values()))
    allowed = {recipe: [AMPLIFIED * change for change in changes(config, references[recipe])]
               for recipe, config in amplified.items()}
    configs = {row.name: settings(folder, row.key, steps, (*row.recipe, *row.layout)) for row in rows}
    for ranks in sorted({row.ranks for row in rows}):
        rank_configs = [configs[row.name] for row in rows if row.ranks == ranks]
        for first in range(0, len(rank_configs), AT_ONCE):
            some = rank_configs[first:first + AT_ONCE]
            if ranks == 1:
                train_all(some)
            else:
                on_ranks(ranks, train_all, some)
    return [compare(row, configs[row.name], references[row.recipe], allowed.get(row.recipe, [0.0, 0.0, 0.0]))
            for row in rows]


def changes(config: TrainConfig, reference: TrainConfig) -> tuple[float, float, float]:
    """Return the largest differences from a reference: of a loss and the validation loss, relative; of a parameter."""
    ours, theirs = losses(config), losses(reference)
    assert ours.keys() == theirs.keys(), f"{config.run.id}: {len(ours)} steps, not {len(theirs)}"
    loss = max(abs(ours[step] - value) / abs(value) for step, value in theirs.items())
    expected = weights(reference, reference)
    parameter = max(float((value - expected[name]).abs().max()) for name, value in weights(config, reference).items())
    return loss, abs(validation_loss(config) / validation_loss(reference) - 1), parameter


def compare(row: Row, config: TrainConfig, reference: TrainConfig, allowed: Sequence[float]) -> dict[str, Any]:
    """Return a row's differences from its reference, and whether they are within the bounds or what is `allowed`."""
    loss, validation, parameter = changes(config, reference)
    bounds = [max(bound, more) for bound, more in zip((LOSS_BOUND, LOSS_BOUND, PARAMETER_BOUND), allowed, strict=True)]
    if row.exact:
        bounds = [0.0, 0.0, 0.0]
    seconds = storage.store(config.run_uri).read_json("seconds.json")
    return {"layout": row.name, "ranks": row.ranks, "loss": f"{loss:.1e}", "parameter": f"{parameter:.1e}",
            "validation": f"{validation:.1e}", "seconds": round(seconds, 1),
            "within": loss <= bounds[0] and validation <= bounds[1] and parameter <= bounds[2]}


def losses(config: TrainConfig) -> dict[int, float]:
    """Return the loss of each step."""
    lines = jsonlog.read(storage.store(config.run_uri), "metrics.jsonl")
    return {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line}


def validation_loss(config: TrainConfig) -> float:
    """Return the validation loss of the finished run."""
    result = read_result(storage.store(config.run_uri))
    assert result is not None
    assert result.validation_loss is not None
    return result.validation_loss


def weights(config: TrainConfig, single: TrainConfig) -> dict[str, torch.Tensor]:
    """Load the last checkpoint of `config` in one process with the layout of `single`."""
    vocabulary = int(storage.store(config.run_uri).read_json("run.json")["vocabulary_size"])
    model = parallel.build(single, vocabulary, Runtime())
    state = training_state(model, build_optimizer(model, single.optimizer))
    assert checkpoints(config).load_latest(state) is not None
    return state["model"]


def main() -> int:
    """Run the rows and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--only", default="", help="rows whose name contains this")
    arguments.add_argument("--rounding", action="store_true", help="change only the rounding of sums, not the layout")
    arguments.add_argument("--list", action="store_true", help="print the names of the rows")
    chosen = arguments.parse_args()
    rows = [row for row in ROWS if chosen.only.lower() in row.name.lower()]
    if chosen.list:
        print("\n".join(row.name for row in rows))
        return 0
    if chosen.rounding:
        rows = rounded(rows)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tidewheel-equivalence-") as folder:
        table = run(Path(folder), rows, chosen.steps)
    print_table(table, title=f"{chosen.steps} steps beside the single process: losses within {LOSS_BOUND:g} relative, "
                             f"parameters within {PARAMETER_BOUND:g}")
    broken = [line["layout"] for line in table if not line["within"]]
    print(f"{len(table) - len(broken)} of {len(table)} within the bounds" + (f"; not: {broken}" if broken else ""))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
