"""Hugging Face Accelerate: the keys of its YAML configuration."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.table import Source
from tidewheel.imports.table_file import read_table

_SHARDING = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "zero3",
             "HYBRID_SHARD_ZERO2": "zero2", "1": "zero3", "2": "zero2", "3": "ddp", "4": "zero3", "5": "zero2"}
_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


def _reshards(given: Any) -> str | None:
    if isinstance(given, bool):
        return "zero3" if given else "zero2"
    return _SHARDING.get(str(given))


def _sharding(source: Source) -> str | None:
    kind = source.get("distributed_type")
    if kind == "FSDP":
        strategy = source.get("fsdp_config.fsdp_sharding_strategy")
        given = source.get("fsdp_config.fsdp_reshard_after_forward", True) if strategy is None else str(strategy)
        return _reshards(given)
    if kind == "DEEPSPEED":
        return _STAGES.get(source.get("deepspeed_config.zero_stage", -1))
    if kind == "MEGATRON_LM" and source.get("megatron_lm_config.megatron_lm_use_distributed_optimizer", False):
        return "zero1"
    return "ddp" if kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MEGATRON_LM") else None


def _joint(source: Source) -> dict[str, Any]:
    workers = source.get("num_processes", 1)
    on_cpu = source.get("use_cpu", False) or source.get("distributed_type") == "MULTI_CPU"
    precision = {"fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}.get(str(source.get("mixed_precision", "no")))
    return {
        "elastic.max_workers": workers if workers > 1 else None,
        "elastic.gpus_per_worker": 0 if on_cpu else None if workers == 1 else 1,
        "batch.global_sequences": workers, "batch.micro_sequences": 1, "batch.virtual_ranks": workers,
        "parallel.data": _sharding(source),
        "precision": precision,
    }


TABLE = read_table("accelerate", _joint, {"stages": _STAGES, "sharding": _SHARDING, "reshards": _reshards})
