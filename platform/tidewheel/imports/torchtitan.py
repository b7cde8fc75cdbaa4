"""torchtitan: the keys of its TOML configuration."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.batch import batch
from tidewheel.imports.optimizer_names import known_optimizer
from tidewheel.imports.table import Source, Unavailable
from tidewheel.imports.table_file import read_table
from tidewheel.models import families

_FLAVORS = {("llama3", "8B"): ("llama", "llama3_8b"), ("llama3", "70B"): ("llama", "llama3_70b"),
            ("llama3", "405B"): ("llama", "llama3_405b"),
            ("qwen3", "0.6B"): ("llama", "qwen3_0.6b"), ("qwen3", "1.7B"): ("llama", "qwen3_1.7b"),
            ("qwen3", "4B"): ("llama", "qwen3_4b"), ("qwen3", "8B"): ("llama", "qwen3_8b"),
            ("qwen3", "14B"): ("llama", "qwen3_14b"), ("qwen3", "32B"): ("llama", "qwen3_32b"),
            ("deepseek_v3", "671B"): ("deepseek_v3", "deepseek_v3")}


def _flavor(given: Any) -> None:
    if str(given) not in {flavor for _, flavor in _FLAVORS}:
        raise Unavailable("no preset of that size: give the shape with --set model.dim=... or --set model.preset=...")


def _name(given: Any) -> None:
    if str(given) not in {name for name, _ in _FLAVORS}:
        raise Unavailable(f"no family for {given} under this name: give --set model.kind=... and its preset")


def _preset(source: Source) -> tuple[str, str] | None:
    found = _FLAVORS.get((str(source.get("model.name", "llama3")), str(source.get("model.flavor", "debugmodel"))))
    if found is None or found[0] not in families.KIND.names() or found[1] not in families.KIND.find(found[0]).PRESETS:
        return None
    return found


def _trackers(source: Source) -> list[Any] | None:
    chosen: list[Any] = ["tensorboard"] if source.get("metrics.enable_tensorboard", False) else []
    if source.get("metrics.enable_wandb", False):
        chosen.append({"kind": "wandb", "project": "torchtitan"})
    return chosen or None


def _joint(source: Source) -> dict[str, Any]:
    unit = 1
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"):
        unit *= int(source.get(f"parallelism.{name}", 1))
    shard = source.get("parallelism.data_parallel_shard_degree", -1)
    replicate = source.get("parallelism.data_parallel_replicate_degree", 1)
    copies = shard * replicate if shard > 0 else None
    data = copies if source.gpus is None else max(1, source.gpus // unit)
    model = _preset(source)
    size = source.get("training.global_batch_size", -1)
    micro = source.get("training.local_batch_size", 8)
    decay = source.get("lr_scheduler.decay_ratio")
    form = source.get("lr_scheduler.decay_type", "linear")
    form = form if form in ("linear", "sqrt", "cosine") else "linear"
    kind = "wsd" if decay or (decay is None and form == "sqrt") else "constant" if decay == 0 else form
    mixed = source.get("training.mixed_precision_param", "bfloat16") == "bfloat16"
    fp8 = "quantize.linear.float8" in source.get("model.converters", []) or "float8" in source.get(
        "model.converters", [])
    reshard = source.get("parallelism.fsdp_reshard_after_forward", "default")
    return {
        **batch(global_size=size if size > 0 else None, micro=micro, gpus=data, where="torchtitan"),
        "model.kind": model[0] if model and model[0] != families.DEFAULT else None,
        "model.preset": model[1] if model else None,
        "optimizer.kind": known_optimizer(source.get("optimizer.name", "AdamW")),
        "optimizer.betas": [source.get("optimizer.beta1", 0.9), source.get("optimizer.beta2", 0.95)],
        "optimizer.learning_rate": source.get("optimizer.lr", 8e-4),
        "schedule.kind": kind,
        "schedule.warmup_steps": source.get("lr_scheduler.warmup_steps", 200),
        "schedule.final_fraction": float(source.get("lr_scheduler.min_lr_factor", source.get("lr_scheduler.lr_min", 0)))
        if kind != "constant" else None,
        "schedule.decay_fraction": float(decay or 1) if kind == "wsd" else None,
        "schedule.decay_form": {"sqrt": "1-sqrt"}.get(form, form) if kind == "wsd" else None,
        "steps": source.get("training.steps", 10000),
        "precision": "fp8" if fp8 else "bf16" if mixed else None,
        "parallel.data": "ddp" if shard == 1 else "zero2" if reshard == "never" else "zero3",
        "parallel.replicate": replicate if replicate > 1 and shard != 1 else None,
        "memory.activation_checkpointing": _recomputed(source),
        "memory.recompute_products": 2 if _recomputed(source) == "selective" else None,
        "memory.every": _interval(source),
        "checkpoint.every_steps": source.get("checkpoint.interval", 500)
        if source.get("checkpoint.enable", source.get("checkpoint.enable_checkpoint", False)) else None,
        "evaluation.every_steps": source.get("validation.freq", 10) if source.get("validation.enable", False) else None,
        "metrics.trackers": _trackers(source),
        "metrics.every_steps": source.get("metrics.log_freq", 10),
        "compile": True if source.get("compile.enable", False) else None,
    }


def _interval(source: Source) -> int | None:
    """Return n of every n-th block, which a number in selective_ac_option asks for."""
    if source.get("activation_checkpoint.mode", "selective") != "selective":
        return None
    option = str(source.get("activation_checkpoint.selective_ac_option", "2"))
    return int(option) if option.isdigit() and int(option) > 1 else None


def _recomputed(source: Source) -> str | None:
    mode = source.get("activation_checkpoint.mode", "selective")
    if mode != "selective":
        return {"full": "full"}.get(mode)
    option = str(source.get("activation_checkpoint.selective_ac_option", "2"))
    return "selective" if option == "op" else "full" if option == "1" else "every_nth"


TABLE = read_table("torchtitan", _joint, {"flavor": _flavor, "name": _name})
