"""How a model is spread over the workers. Nothing here imports torch, and nothing here decides the result."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.train.parallel.stages import ScheduleName, default_per_rank


class ParallelConfig(Config):
    """The layout: tensor x pipeline x context workers hold one copy of the model, data parallel takes the rest.

    The sizes are of the innermost to the outermost dimension of the mesh tensor, context, shard, replicate, pipeline:
    ranks of one tensor group are neighbours, and so on one node.
    """

    data: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """What data-parallel workers share out. ddp: nothing; zero1: optimizer state; zero2: gradients too, and parameters
    between steps (FSDP2 that keeps them from forward to backward); zero3: parameters always (FSDP2). As in ZeRO,
    https://arxiv.org/abs/1910.02054. auto: zero2 below 100 M parameters, zero3 from there on."""
    replicate: int = Field(default=1, ge=1)
    """zero2 and zero3: so many copies of the model, each sharded over 1/replicate of the data-parallel workers (HSDP).
    ddp and zero1 have a copy per worker: leave it at 1."""
    tensor: int = Field(default=1, ge=1)
    """Workers that share each layer, with sequence and loss parallel."""
    pipeline: int = Field(default=1, ge=1)
    """Workers in a row that each hold some of the layers."""
    pipeline_schedule: ScheduleName = "1f1b"
    """Order of the micro-batches' passes through the pipeline, see docs/pipeline_parallel.md."""
    pipeline_stages: int | None = Field(default=None, ge=1)
    """Stages on each pipeline worker; default: 1 for 1f1b and gpipe, which take no other number, 2 for the others."""
    context: int = Field(default=1, ge=1)
    """Workers that share each sequence."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """zero2 and zero3: when gradients are summed over workers and cut. step: once, after the last micro-batch: least
    communication, but whole gradients between micro-batches; micro_batch: after each, so that only shards are ever
    kept; of HSDP's replicas always once. auto: step below 100 M parameters, micro_batch from there on. A pipeline
    reduces once per step."""
    offload: bool = False
    """zero2 and zero3: parameters, gradients and optimizer state stay in host memory (FSDP2's CPU offload)."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.replicate > 1 and not self.fully_sharded:
            raise ValueError(f"replicate {self.replicate} is for zero2 and zero3, but data is {self.data}, which has a "
                             "copy per worker; nearest that is legal: replicate 1, or data zero3")
        if self.reduce == "micro_batch" and not self.fully_sharded:
            raise ValueError(f"reduce micro_batch is for zero2 and zero3, but data is {self.data}, which keeps whole "
                             "gradients anyway; nearest that is legal: step")
        if self.reduce == "micro_batch" and self.pipeline > 1:
            raise ValueError("reduce micro_batch, but torch's pipelines reduce after the last micro-batch; nearest "
                             "that is legal: step")
        if self.offload and not self.fully_sharded:
            raise ValueError(f"offload is FSDP2's, but data is {self.data}; nearest that is legal: zero2")
        usual = default_per_rank(self.pipeline_schedule)
        if self.stages_per_rank != usual and self.pipeline_schedule in ("1f1b", "gpipe", "zbv_zero_bubble"):
            raise ValueError(f"pipeline_schedule {self.pipeline_schedule} has {usual} stage(s) on each worker, not "
                             f"{self.stages_per_rank}; nearest that is legal: pipeline_stages {usual}")
        return self

    @property
    def fully_sharded(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.data in ("auto", "zero2", "zero3")

    @property
    def stages_per_rank(self) -> int:
        """`pipeline_stages`, resolved."""
        return self.pipeline_stages or default_per_rank(self.pipeline_schedule)

    @property
    def unit(self) -> int:
        """Workers that hold one copy of the model between them, before data parallelism."""
        return self.tensor * self.pipeline * self.context
