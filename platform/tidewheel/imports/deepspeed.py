"""DeepSpeed: the keys of ds_config.json."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.batch import batch
from tidewheel.imports.optimizer_names import known_optimizer
from tidewheel.imports.table import Source, Unavailable
from tidewheel.imports.table_file import read_table

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_NVME = "/local_nvme"
_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


def _dynamic(given: Any) -> None:
    if given:
        raise Unavailable(f"the loss scale is dynamic; {given} would fix it")


def _up_to_1000(given: Any) -> int | None:
    return min(int(given), 1000) or None


def _autocast(source: Source) -> str | None:
    if not source.get("torch_autocast.enabled", False):
        return None
    return {"float16": "fp16", "bfloat16": "bf16"}.get(str(source.get("torch_autocast.dtype", "bfloat16")))


def _trackers(source: Source) -> list[Any] | None:
    chosen: list[Any] = []
    if source.get("tensorboard.enabled", False):
        chosen.append("tensorboard")
    if source.get("wandb.enabled", False):
        team = source.get("wandb.team")
        chosen.append({"kind": "wandb", "project": source.get("wandb.project", "deepspeed"),
                       **({"entity": team} if team else {})})
    return chosen or None


def _sharding(source: Source) -> dict[str, Any]:
    """Return what is sharded and offloaded. DeepSpeed offloads in stages 1 to 3, FSDP2 in ours from 2 on."""
    group = "zero_optimization"
    stage = source.get(f"{group}.stage", 0)
    offload = any(source.get(f"{group}.{name}.device") == "cpu" for name in ("offload_optimizer", "offload_param"))
    on_disk = source.get(f"{group}.offload_optimizer.device") == "nvme"
    path = source.get(f"{group}.offload_optimizer.nvme_path")
    offload = offload or source.get(f"{group}.cpu_offload", False) or source.get(f"{group}.cpu_offload_param", False)
    offload = offload or on_disk
    offload = offload and stage in (1, 2, 3)
    return {"parallel.data": "zero2" if offload and stage == 1 else _STAGES.get(stage),
            "parallel.offload": True if offload else None,
            "memory.optimizer_disk": (path or _NVME) if on_disk and offload else None,
            "checkpoint.memory_tier": {"every_steps": 0} if on_disk and offload else None}


def _optimizer(source: Source) -> str | None:
    kind = known_optimizer(source.get("optimizer.type"))
    return "adam" if kind == "adamw" and source.get("optimizer.params.adam_w_mode") is False else kind


def _joint(source: Source) -> dict[str, Any]:
    tensor = int(source.get("tensor_parallel.autotp_size", 0) or 1)
    gpus = None if source.gpus is None else max(1, source.gpus // tensor)
    scheduled = source.get("scheduler.type") in _SCHEDULES
    kind = _SCHEDULES.get(str(source.get("scheduler.type")), "constant")
    fp16, bf16 = source.get("fp16.enabled", False), source.get("bf16.enabled", source.get("bfloat16.enabled", False))
    elastic = source.get("elasticity.enabled", False)
    size = source.get("train_batch_size", source.get("elasticity.max_train_batch_size") if elastic else None)
    peak = source.get("scheduler.params.warmup_max_lr", source.get("optimizer.params.lr"))
    return {
        **batch(global_size=size, micro=source.get("train_micro_batch_size_per_gpu"),
                accumulation=source.get("gradient_accumulation_steps"), gpus=gpus, where="DeepSpeed"),
        **_sharding(source),
        "optimizer.kind": _optimizer(source),
        "optimizer.learning_rate": peak if source.get("optimizer.params.muon_lr") is None
        else source.get("optimizer.params.muon_lr"),
        "precision": "fp16" if fp16 else "bf16" if bf16 else _autocast(source),
        "schedule.kind": kind,
        "schedule.warmup_steps": source.get("scheduler.params.warmup_num_steps", 1000) if scheduled else 0,
        "schedule.final_fraction": None if kind == "constant" else
        source.get("scheduler.params.cos_min_ratio", 1e-4) if kind == "cosine" else 0.0,
        "metrics.trackers": _trackers(source),
        "memory.activation_checkpointing":
            "offload" if source.get("activation_checkpointing.cpu_checkpointing", False) else None,
    }


TABLE = read_table("deepspeed", _joint, {
    "schedules": _SCHEDULES, "stages": _STAGES, "dynamic": _dynamic, "up_to_1000": _up_to_1000})
