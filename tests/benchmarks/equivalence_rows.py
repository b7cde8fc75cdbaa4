"""Rows of `tests.benchmarks.equivalence`: layouts, and the recipes that each is compared under."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tidewheel.models import families
from tidewheel.train import compressions
from tidewheel.train.parallel.stages import SCHEDULES

LENGTH, SEQUENCES = 32, 16


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
