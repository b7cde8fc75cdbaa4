"""Configurations that reproducible mode refuses before any process starts. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.parts import name_of
from tidewheel.train import optimizers

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.parallel.config import ParallelConfig


def reason_against(config: TrainConfig) -> str | None:
    """Return why a configuration's result would depend on the number of workers, or None."""
    if not config.reproducible:
        return _recomputed(config)
    if config.optimizer.NOT_REPRODUCIBLE:
        reproducible = optimizers.where(lambda optimizer: not optimizer.NOT_REPRODUCIBLE)
        return (f"reproducible, but optimizer.kind {name_of(type(config.optimizer))} "
                f"{config.optimizer.NOT_REPRODUCIBLE}; nearest legal choice: {reproducible}")
    if config.precision == "fp8":
        return "reproducible, but torchao's fp8 layers have not been shown to be; nearest legal choice: precision bf16"
    if config.parallel.reduce_dtype != "fp32":
        return (f"reproducible, but parallel.reduce_dtype {config.parallel.reduce_dtype} rounds each sum over workers, "
                "so the result would depend on their number; nearest legal choice: reduce_dtype fp32")
    if config.parallel.async_tensor:
        return ("reproducible, but the kernels of parallel.async_tensor have not been shown to be; nearest legal "
                "choice: async_tensor false")
    return _pipeline(config.parallel) or _recomputed(config)


def _recomputed(config: TrainConfig) -> str | None:
    if config.guards.recomputation is None:
        return None
    if not config.reproducible:
        return ("guards.recomputation compares a gradient's bits on two workers, which differ unless reproducible is "
                "true; nearest legal choice: reproducible true")
    if config.parallel.expert > 1:
        return (f"guards.recomputation with parallel.expert {config.parallel.expert}: an expert's gradient is always "
                "computed by the workers that hold the expert; nearest legal choice: expert 1")
    return None


def _pipeline(parallel: ParallelConfig) -> str | None:
    if parallel.pipeline == 1:
        return None
    if parallel.fully_sharded:
        return (f"reproducible with parallel.pipeline {parallel.pipeline}, but FSDP2 (data {parallel.data}) adds up a "
                "stage's micro-batches itself; nearest legal choice: data zero1")
    if "zero_bubble" in parallel.pipeline_schedule:
        return (f"reproducible, but pipeline_schedule {parallel.pipeline_schedule} takes a micro-batch's gradients in "
                "two passes, between which others come; nearest legal choice: interleaved_1f1b")
    return None
