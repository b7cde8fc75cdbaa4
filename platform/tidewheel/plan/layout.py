"""The subject of a plan: a run, which is fixed, and its layout, which is free. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

from tidewheel.models.costs import LayerCosts
from tidewheel.models.family import Model
from tidewheel.plan.routed_rows import OWN, ExpertTechniques, RoutedRows, routed_rows
from tidewheel.train.average import Average
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.stages import stages

KEEP_PARAMETERS = 100_000_000
"""`data: auto` is zero2 up to this many parameters, and zero3 above; as in `train.parallel.building`, which needs
torch."""

GRADIENT_BYTES = 4
"""Bytes of a gradient: fp32, also for bf16 parameters."""


@dataclass(frozen=True)
class Job:
    """A run, as a plan sees it."""

    config: TrainConfig
    vocabulary_size: int
    sequence_length: int
    techniques: ExpertTechniques = OWN
    teacher: Job | None = None
    """A live teacher, as a job of its own; None: there is none."""

    @property
    def model(self) -> Model:
        """The model's shape."""
        return self.config.model

    @property
    def row_tokens(self) -> int:
        """Tokens of a row of the global batch: of a pair, those of all its sequences."""
        return self.sequence_length * self.config.objective.parts

    @cached_property
    def costs(self) -> LayerCosts:
        """Parameters of all blocks."""
        return self.model.costs()

    @cached_property
    def block_matrices(self) -> float:
        """Parameters of a block that tensor parallelism cuts, on average: its matrices, and biases of their outputs."""
        return _share(self.costs.matrices + self.costs.cut, self.model.num_layers)

    @cached_property
    def block_products(self) -> float:
        """Parameters of a block that multiply a token, on average."""
        return _share(self.costs.active + self.costs.cut, self.model.num_layers)

    @cached_property
    def routed_products(self) -> float:
        """Parameters of a block's routed experts that multiply a token, on average; part of `block_products`."""
        model = self.model
        return self.costs.experts / model.num_layers * getattr(model, "experts_per_token", 0) / self.routed_rows.experts

    @cached_property
    def block_norms(self) -> float:
        """Parameters of a block that every tensor-parallel rank has, on average: its norms and other biases."""
        return _share(self.costs.whole, self.model.num_layers)

    @cached_property
    def vocabulary_matrix(self) -> int:
        """Parameters of the embedding, and of the output when it is a matrix of its own."""
        return self.vocabulary_size * self.model.dim

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.model.parameters(self.vocabulary_size)

    @cached_property
    def routed_rows(self) -> RoutedRows:
        """How tokens reach experts."""
        return routed_rows(self.model)

    @cached_property
    def flops_per_token(self) -> int:
        """Training FLOPs per token, see `Model.flops_per_token`."""
        return self.model.flops_per_token(self.vocabulary_size, self.sequence_length)

    @cached_property
    def windows(self) -> tuple[tuple[int | None, int], ...]:
        """Attention windows and the number of layers that have each."""
        found = [self.model.window(layer) for layer in range(self.model.num_layers)]
        return tuple((window, found.count(window)) for window in dict.fromkeys(found))

    @cached_property
    def saved_parameters(self) -> int:
        """Parameters that are trained and saved: all, or those of an adapter."""
        adapter = self.config.adapter
        return self.parameters if adapter is None else adapter.parameters(self.model, self.vocabulary_size)

    @property
    def saved_bytes(self) -> int:
        """Bytes of such a parameter; an adapter's are fp32."""
        return self.weight_bytes if self.config.adapter is None else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of a parameter."""
        return 2 if self.config.parameters == "bf16" else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of a matrix product's operand, which is kept for the backward pass."""
        return 4 if self.config.precision == "fp32" else 2

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a parameter that FSDP2 gathers: in the products' dtype, except in reproducible mode."""
        lowered = self.config.precision != "fp32" and not self.config.reproducible
        return 2 if lowered else self.weight_bytes

    def gathered_here(self, ranks: int) -> int:
        """Return the bytes of a parameter that FSDP2 of `ranks` ranks gathers: one rank keeps the parameters' dtype."""
        return self.weight_bytes if ranks == 1 else self.gathered_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of an element of the residual stream, which has the dtype of the parameters."""
        return self.weight_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of optimizer state per parameter, with fp32 master weights beside bf16 parameters, and averages."""
        masters = 4 if self.saved_bytes == 2 else 0
        averages = sum(4 * (1 + part.others) for part in self.config.callbacks if isinstance(part, Average))
        return self.config.optimizer.state_bytes(*self._updated) / self.saved_parameters + masters + averages

    @property
    def disk_bytes(self) -> float:
        """Bytes of these that are on the node's disk (`memory.optimizer_disk`): all but the averages."""
        if not self.config.memory.optimizer_disk:
            return 0.0
        masters = 4 if self.saved_bytes == 2 else 0
        return self.config.optimizer.state_bytes(*self._updated) / self.saved_parameters + masters

    @property
    def paged_bytes(self) -> float:
        """Bytes of these that are in host memory; see `Optimizer.host_bytes`."""
        return self.config.optimizer.host_bytes(*self._updated) / self.saved_parameters

    @property
    def _updated(self) -> tuple[int, int]:
        """Parameters that the optimizer updates, and those of them in matrices of blocks."""
        matrices = self.costs.matrices + self.costs.cut if self.config.adapter is None else self.saved_parameters
        return self.saved_parameters, matrices

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint: parameters and optimizer state, once, in every layout."""
        return self.saved_parameters * (self.saved_bytes + self.optimizer_bytes)


@dataclass(frozen=True)
class Layout:
    """One way to parallelize a job over the GPUs."""

    parallel: ParallelConfig
    """Parallelism, with `data` resolved."""
    memory: MemoryConfig
    micro_sequences: int
    data: int
    """Data-parallel ranks: replicate x shard."""
    micro_batches: int
    """Micro-batches of a data-parallel rank in a step."""

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return self.data * self.parallel.unit

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP2 or ZeRO-1 shards over, including context-parallel ranks."""
        return self.data // self.copies * self.parallel.context

    @property
    def copies(self) -> int:
        """Number of copies of the model that FSDP2 shards."""
        return self.parallel.copies(self.data)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters: over several ranks, or in host memory."""
        return self.parallel.data in ("zero2", "zero3") and (self.shards > 1 or self.parallel.offload)

    @property
    def reduces_once(self) -> bool:
        """Whether unsharded gradients are kept between the micro-batches of a step (`parallel.reduce: step`)."""
        return self.parallel.pipeline > 1 or self.parallel.reduce == "step"

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient while it is summed over data-parallel ranks."""
        return 2 if self.parallel.reduce_dtype == "bf16" else GRADIENT_BYTES

    def in_flight(self) -> float:
        """Return the number of micro-batches whose activations the first pipeline rank keeps at once.

        p for 1F1B (arXiv:2006.09503) and both zero-bubble schedules (arXiv:2401.10241), m for GPipe, p (1 + (p-1) /
        (p v)) for interleaved 1F1B with v stages on a rank (arXiv:2205.05198, section 4.2.3); never more than m.
        """
        wide, num_micro_batches = self.parallel.pipeline, self.micro_batches
        if wide == 1 or self.parallel.pipeline_schedule == "gpipe":
            return 1.0 if wide == 1 else float(num_micro_batches)
        stacked = 0.0
        if self.parallel.pipeline_schedule == "interleaved_1f1b":
            stacked = (wide - 1) / self.parallel.stages_per_rank
        return min(num_micro_batches, wide + stacked)

    def describe(self) -> str:
        """Return the layout as text: "TP 4 x PP 8 x DP 8 zero1"."""
        p = self.parallel
        sizes = [("TP", p.tensor), ("PP", p.pipeline), ("CP", p.context), ("DP", self.data), ("EP", p.expert)]
        mesh = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one GPU"
        kind = f" {p.data}" if self.data * p.context > 1 else ""
        return mesh + kind + (f" in {self.copies} copies" if self.copies > 1 else "")

    def settings(self) -> dict[str, object]:
        """Return the settings of the training configuration that select this layout, as `--set` takes them."""
        p = self.parallel
        settings: dict[str, object] = {"parallel.data": p.data}
        for name in ("tensor", "pipeline", "context", "replicate", *(["expert"] if p.expert > 1 else [])):
            settings[f"parallel.{name}"] = getattr(p, name)
        if p.context > 1:
            settings["parallel.context_method"] = p.context_method
        if p.pipeline > 1:
            settings["parallel.pipeline_schedule"] = p.pipeline_schedule
        kept = self.memory.model_dump(exclude_unset=True)
        settings |= {f"memory.{name}": as_text(value) for name, value in kept.items()}
        settings["batch.micro_sequences"] = self.micro_sequences
        return settings


def as_text(value: object) -> object:
    """Return a setting's value as YAML reads it back: a list and an empty string have a form of their own."""
    return json.dumps(value) if isinstance(value, (tuple, list)) or value == "" else value


@dataclass(frozen=True)
class Share:
    """The part of the model on one pipeline rank."""

    rank: int
    blocks: int
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the final norm and the output matrix."""
    in_flight: float
    """Micro-batches whose activations it keeps at once."""


def shares(job: Job, layout: Layout) -> list[Share]:
    """Return the pipeline ranks that can be the fullest or slowest: the first two and the last.

    The second may have a block more than the first.
    """
    parallel, layers = layout.parallel, job.model.num_layers
    if parallel.pipeline == 1:
        return [Share(0, layers, True, True, 1.0)]
    cuts = stages(layers, parallel.pipeline, parallel.pipeline_schedule, parallel.stages_per_rank)
    most = layout.in_flight()
    decreases = parallel.pipeline_schedule in ("1f1b", "interleaved_1f1b")
    ranks = []
    for rank in sorted({0, 1, parallel.pipeline - 1}):
        rank_stages = [stage for stage in cuts if stage.rank == rank]
        # 1F1B: each rank starts one micro-batch fewer than the one before it
        held = max(1.0, min(layout.micro_batches, most - rank)) if decreases else most
        ranks.append(Share(rank, sum(len(stage.blocks) for stage in rank_stages), any(s.first for s in rank_stages),
                           any(s.last for s in rank_stages), held))
    return ranks


def _share(total: int, parts: int) -> float:
    """Return a part of a total, as an integer if it is one."""
    return total // parts if total % parts == 0 else total / parts
