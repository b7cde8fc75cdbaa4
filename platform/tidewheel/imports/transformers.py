"""Hugging Face transformers: the fields of TrainingArguments, as JSON."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.batch import batch, warmup
from tidewheel.imports.optimizer_names import known_optimizer
from tidewheel.imports.table import Source, Unavailable
from tidewheel.imports.table_file import read_table

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
              "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
_KWARGS = ("min_lr", "min_lr_rate", "min_lr_ratio", "num_decay_steps", "decay_type")
_TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}


def _whole(given: Any) -> int | None:
    """Return a number of steps; a share of the run below 1 is not one."""
    if isinstance(given, float) and 0 < given < 1:
        raise Unavailable("intervals are whole steps here, not a share of the run")
    return int(given) or None


def _trackers(given: Any) -> list[Any] | None:
    names = [given] if isinstance(given, str) else list(given)
    if names in (["none"], ["all"], []):
        return None
    unknown = [name for name in names if name not in _TRACKERS]
    if unknown:
        raise Unavailable(f"no tracker {', '.join(unknown)}; tw.Tracker is open for your own")
    return [{"kind": "wandb", "project": "huggingface"} if name == "wandb" else name for name in names]


def _fsdp(given: Any) -> str | None:
    words = given if isinstance(given, list) else str(given or "").split()
    if "full_shard" in words or "hybrid_shard" in words:
        return "zero3"
    return "zero2" if "shard_grad_op" in words or "hybrid_shard_zero2" in words else None


def _kwargs(given: Any) -> None:
    """Take arguments of a schedule, which `_schedule` reads.

    Raises:
        Unavailable: we have no such argument.
    """
    plain = {"num_cycles": 0.5, "last_epoch": -1, "warmup_type": "linear"}
    lost = [f"{name} {value}" for name, value in (given if isinstance(given, dict) else {}).items()
            if name not in _KWARGS and plain.get(name) != value]
    if lost:
        raise Unavailable(f"no counterpart of {', '.join(lost)}; only of {', '.join(_KWARGS)}")


def _schedule(source: Source, steps: int | None) -> dict[str, Any]:
    kind = _SCHEDULES.get(str(source.get("lr_scheduler_type", "linear")), "linear")
    kwargs = source.get("lr_scheduler_kwargs", {})
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    final = float(kwargs.get("min_lr_rate") or kwargs.get("min_lr_ratio") or 0.0)
    if kwargs.get("min_lr"):
        final = float(kwargs["min_lr"]) / source.get("learning_rate", 5e-5)
    given = source.get("warmup_ratio") or source.get("warmup_steps", 0)
    is_wsd = kind == "wsd"
    return {
        "schedule.kind": kind,
        "schedule.warmup_steps": warmup(given, steps),
        "schedule.final_fraction": None if kind == "constant" else final,
        "schedule.decay_steps": kwargs.get("num_decay_steps") if is_wsd else None,
        "schedule.decay_form": kwargs.get("decay_type", "cosine") if is_wsd else None,
    }


def _joint(source: Source) -> dict[str, Any]:
    steps = source.get("max_steps", 0)
    steps = steps if steps > 0 else None
    kind = known_optimizer(source.get("optim", "adamw_torch_fused"))
    betas = [source.get("adam_beta1", 0.9), source.get("adam_beta2", 0.999)]
    betas += [0.9999] if kind == "ademamix" else []
    precision = "fp16" if source.get("fp16", False) else "bf16" if source.get("bf16", False) else None
    words = source.get("fsdp", "")
    return {
        **batch(micro=source.get("per_device_train_batch_size", source.get("per_gpu_train_batch_size", 8)),
                accumulation=source.get("gradient_accumulation_steps", 1), gpus=source.gpus or 1, where="transformers"),
        "optimizer.kind": kind,
        "optimizer.learning_rate": source.get("learning_rate", 5e-5),
        "optimizer.weight_decay": float(source.get("weight_decay", 0.0)),
        "optimizer.clip_norm": float(source.get("max_grad_norm", 1.0)),
        "optimizer.betas": betas,
        "precision": precision,
        "steps": steps, **_schedule(source, steps),
        "seed": source.get("seed", 42),
        "data.seed": source.get("data_seed", source.get("seed", 42)),
        "evaluation.every_steps": (_or_none(source.get("eval_steps", source.get("logging_steps", 500)))
                                   if source.get("eval_strategy", source.get("evaluation_strategy")) == "steps"
                                   else None),
        "checkpoint.every_steps": (_or_none(source.get("save_steps", 500))
                                   if source.get("save_strategy", "steps") == "steps" else 0),
        "checkpoint.keep_best": 1 if source.get("load_best_model_at_end", False) else None,
        "parallel.data": "ddp" if not words or words == [] else _fsdp(words),
        "parallel.offload": True if "offload" in str(words) else None,
    }


def _or_none(given: Any) -> int | None:
    try:
        return _whole(given)
    except Unavailable:
        return None



TABLE = read_table("transformers", _joint, {
    "schedules": _SCHEDULES, "whole": _whole, "trackers": _trackers, "kwargs": _kwargs})
