"""Settings of the layout. They do not change the result. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.train.parallel.stages import ScheduleName, default_per_rank


class ParallelConfig(Config):
    """The layout: tensor x pipeline x context workers hold one copy of the model; data parallelism uses the rest.

    Dimensions of the mesh, from innermost to outermost: tensor, context, shard, replicate, pipeline. Ranks of a tensor
    group are neighbours, and so on one node.
    """

    data: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """What data-parallel workers shard, as in ZeRO (https://arxiv.org/abs/1910.02054). ddp: nothing; zero1: optimizer
    state; zero2: also gradients, and parameters between steps (FSDP2 without resharding after the forward pass); zero3:
    parameters always (FSDP2). auto: zero2 below 100 M parameters, zero3 above."""
    replicate: int = Field(default=1, ge=1)
    """For zero2 and zero3: number of copies of the model, each sharded over 1/replicate of the data-parallel workers
    (HSDP). ddp and zero1 have a copy on each worker; leave it at 1."""
    shard: int | None = Field(default=None, ge=1)
    """For zero2 and zero3, in the place of `replicate`: number of data-parallel workers that share a copy of the model,
    its replica group. There are as many copies as the workers of the moment make up: when a group loses a worker, the
    other groups go on at once, each with more of the global batch."""
    tensor: int = Field(default=1, ge=1)
    """Workers that share each layer, with sequence and loss parallel."""
    async_tensor: bool = False
    """Overlap the collectives of tensor parallelism with the matrix products beside them, through torch's symmetric
    memory: NVIDIA GPUs of one node that can read each other's memory. It changes only speed and rounding."""
    pipeline: int = Field(default=1, ge=1)
    """Number of workers that share the layers as pipeline stages."""
    pipeline_schedule: ScheduleName = "1f1b"
    """Order in which micro-batches pass through the pipeline, see docs/pipeline_parallel.md."""
    pipeline_stages: int | None = Field(default=None, ge=1)
    """Stages on each pipeline worker. Default: 1 for 1f1b and gpipe, which take no other number, 2 for the others."""
    context: int = Field(default=1, ge=1)
    """Workers that share each sequence."""
    context_method: Literal["all_gather", "all_to_all", "ring"] = "all_gather"
    """What these workers exchange for attention. all_gather: the keys of whole sequences, to every worker. all_to_all:
    positions for heads (Ulysses, https://arxiv.org/abs/2309.14509), at most as many workers as query heads. ring: keys
    pass from worker to worker (https://arxiv.org/abs/2310.01889), for sequences whose keys do not fit."""
    context_balance: Literal["documents", "zigzag"] = "documents"
    """Which positions a worker keeps. documents: such that attention over the packed documents of each row costs every
    worker the same. zigzag: pieces i and 2N-1-i of 2N, which is even for rows of one document. all_to_all has no
    choice: neighbouring positions."""
    expert: int = Field(default=1, ge=1)
    """For zero2 and zero3 with a mixture of experts: number of neighbouring workers, among those that shard the
    parameters (shard x context), that share the experts of each layer. Each holds num_experts / expert of them and
    tokens travel to their experts. It does not add workers: other parameters stay sharded over all of them."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """For zero2 and zero3: when gradients are reduce-scattered. step: once, after the last micro-batch, which
    communicates least but keeps whole gradients between micro-batches. micro_batch: after each, so that only shards are
    kept; HSDP's replicas are still reduced once. auto: step below 100 M parameters, micro_batch above. A pipeline
    reduces once per step."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number type in which gradients are summed over data-parallel workers. bf16 sends half the bytes and rounds each
    sum; micro-batches are still added up in fp32."""
    prefetch: int = Field(default=1, ge=1, le=8)
    """For zero2 and zero3: number of layers whose parameters are gathered ahead of the one that computes, in both
    directions. More hide a slow network better, and take the memory of a layer each."""
    bucket_bytes: int = Field(default=25 * 2**20, ge=1024)
    """For ddp and zero1: approximate bytes of gradients that are sent together, as soon as the backward pass has them.
    Small buckets start early, large ones use a network better. zero2 and zero3 send a layer at a time."""
    offload: bool = False
    """For zero2 and zero3: keep parameters, gradients and optimizer state in host memory (FSDP2's CPU offload)."""
    overlap_update: bool = False
    """With `offload`: update a layer in a thread as soon as its gradient is final, while the backward pass goes on. It
    needs `optimizer.clip_norm` 0, guards that never withhold an update, and an optimizer whose update communicates
    nothing, such as adamw; no bit changes."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.replicate > 1 and not self.fully_sharded:
            raise ValueError(f"replicate {self.replicate} is for zero2 and zero3, but data is {self.data}, which has a "
                             "copy per worker; nearest legal choice: replicate 1, or data zero3")
        if self.shard is not None and not self.fully_sharded:
            raise ValueError(f"shard {self.shard} is for zero2 and zero3, but data is {self.data}; nearest legal "
                             "choice: leave shard out, or data zero3")
        if self.shard is not None and self.replicate > 1:
            raise ValueError(f"replicate {self.replicate} fixes the number of copies, and shard {self.shard} the "
                             "workers of each; nearest legal choice: replicate 1")
        if self.reduce == "micro_batch" and not self.fully_sharded:
            raise ValueError(f"reduce micro_batch is for zero2 and zero3, but data is {self.data}, which keeps whole "
                             "gradients anyway; nearest legal choice: step")
        if self.reduce == "micro_batch" and self.pipeline > 1:
            raise ValueError("reduce micro_batch, but torch's pipelines reduce after the last micro-batch; nearest "
                             "legal choice: step")
        if self.reduce_dtype == "bf16" and self.has_copies and self.reduce == "micro_batch":
            copies = f"shard {self.shard}" if self.shard is not None else f"replicate {self.replicate}"
            raise ValueError(f"reduce_dtype bf16 with {copies} and reduce micro_batch would add up "
                             "micro-batches in bf16; nearest legal choice: reduce step, or reduce_dtype fp32")
        if self.async_tensor and self.tensor == 1:
            raise ValueError("async_tensor overlaps the collectives of tensor parallelism, but tensor is 1; nearest "
                             "legal choice: async_tensor false, or tensor 2")
        if self.offload and not self.fully_sharded:
            raise ValueError(f"offload is FSDP2's, but data is {self.data}; nearest legal choice: zero2")
        if self.expert > 1 and not self.fully_sharded:
            raise ValueError(f"expert {self.expert} is for zero2 and zero3, but data is {self.data}, which has all "
                             "experts on each worker; nearest legal choice: expert 1, or data zero2")
        if self.expert > 1 and self.pipeline > 1 and "zero_bubble" in self.pipeline_schedule:
            raise ValueError(f"expert {self.expert} sends gradients between workers in the backward pass, which "
                             f"pipeline_schedule {self.pipeline_schedule} does in two passes; nearest legal choice: "
                             "interleaved_1f1b")
        usual = default_per_rank(self.pipeline_schedule)
        if self.stages_per_rank != usual and self.pipeline_schedule in ("1f1b", "gpipe", "zbv_zero_bubble"):
            raise ValueError(f"pipeline_schedule {self.pipeline_schedule} has {usual} stage(s) on each worker, not "
                             f"{self.stages_per_rank}; nearest legal choice: pipeline_stages {usual}")
        return self

    @property
    def fully_sharded(self) -> bool:
        """Return whether FSDP2 shards the parameters."""
        return self.data in ("auto", "zero2", "zero3")

    @property
    def has_copies(self) -> bool:
        """Return whether FSDP2 may have several copies of the model (HSDP)."""
        return self.replicate > 1 or self.shard is not None

    def copies(self, data: int) -> int:
        """Return the number of copies of the model that FSDP2 shards.

        Args:
            data: data-parallel workers, a legal number.
        """
        return self.replicate if self.shard is None else data // self.shard

    @property
    def group(self) -> int:
        """Return the number of workers of a replica group, which hold one copy of the model; 0 without such groups.

        Their ranks are neighbours, but for a pipeline's.
        """
        return 0 if self.shard is None or self.pipeline > 1 else self.shard * self.unit

    @property
    def stages_per_rank(self) -> int:
        """Return the number of stages on each pipeline worker."""
        return self.pipeline_stages or default_per_rank(self.pipeline_schedule)

    @property
    def unit(self) -> int:
        """Return the number of workers that hold one copy of the model, before data parallelism."""
        return self.tensor * self.pipeline * self.context
