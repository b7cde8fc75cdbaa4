"""Megatron-LM: the command-line arguments of pretrain_gpt.py."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.batch import batch
from tidewheel.imports.optimizer_names import known_optimizer
from tidewheel.imports.table import Source
from tidewheel.imports.table_file import read_table

_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
_WSD = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}


def _is_gpt2(source: Source) -> bool:
    return not source.get("swiglu", False) and not _is_rotary(source)


def _is_rotary(source: Source) -> bool:
    return source.get("position-embedding-type") == "rope" or source.get("use-rotary-position-embeddings", False)


def _model(source: Source) -> dict[str, Any]:
    """Return the model family and its shape."""
    if source.get("num-layers") is None:
        return {}
    kind = "gpt2" if _is_gpt2(source) else "llama"
    experts = source.get("num-experts")
    if experts and kind == "llama":
        kind = "deepseek_v3" if source.get("multi-latent-attention", False) else (
            "qwen3_moe" if source.get("qk-layernorm", False) else "mixtral")
    tied = not source.get("untie-embeddings-and-output-weights", False)
    return {
        "model.kind": None if kind == "llama" else kind,
        "model.num_kv_heads": (source.get("num-query-groups", 1) if source.get("group-query-attention", False)
                               else None),
        "model.tie_embeddings": tied,
        "model.qk_norm": source.get("qk-layernorm", False) if kind == "llama" else None,
        "model.rope_theta": None if kind == "gpt2" else float(source.get("rotary-base", 10000)),
        "model.norm_epsilon": float(source.get("norm-epsilon", 1e-5)),
        "model.init_std": float(source.get("init-method-std", 0.02)),
    }


def _precision(source: Source) -> str | None:
    if source.get("fp8-format") in ("hybrid", "e4m3"):
        return "fp8"
    if source.get("fp16", False):
        return "fp16"
    return "bf16" if source.get("bf16", False) else None


def _unit(source: Source) -> int:
    unit = 1
    for name in ("tensor", "pipeline"):
        unit *= int(source.get(f"{name}-model-parallel-size", 1))
    return unit * int(source.get("context-parallel-size", 1))


def _schedule(source: Source, size: int | None) -> dict[str, Any]:
    steps = source.get("train-iters")
    samples = source.get("train-samples")
    if steps is None and samples is not None and size:
        steps = -(-samples // size)
    warmup = source.get("lr-warmup-iters", 0)
    if source.get("lr-warmup-samples") is not None and size:
        warmup = source.get("lr-warmup-samples") // size
    length = source.get("lr-decay-iters", steps)
    if source.get("lr-decay-samples") is not None and size:
        length = source.get("lr-decay-samples") // size
    if source.get("lr-warmup-fraction") is not None and length:
        warmup = int(source.get("lr-warmup-fraction") * length)
    kind = _SCHEDULES.get(str(source.get("lr-decay-style", "linear")))
    lowest, peak = source.get("min-lr", 0.0), source.get("lr")
    final = lowest / peak if peak else None
    wsd = source.get("lr-wsd-decay-iters")
    if source.get("lr-wsd-decay-samples") is not None and size:
        wsd = source.get("lr-wsd-decay-samples") // size
    found = {"steps": steps, "schedule.kind": kind, "schedule.warmup_steps": warmup}
    if kind in ("linear", "cosine") and steps and length != steps:
        return {**found, "schedule.kind": "piecewise", "schedule.pieces": _pieces(kind, length, steps, final or 0.0)}
    return {
        **found,
        "schedule.final_fraction": None if kind == "constant" else final,
        "schedule.decay_fraction": wsd / steps if kind == "wsd" and wsd and steps else None,
        "schedule.decay_form": _WSD.get(str(source.get("lr-wsd-decay-style")), "linear") if kind == "wsd" else None,
    }


def _pieces(form: str, length: int, steps: int, final: float) -> list[dict[str, Any]]:
    """Return the pieces of a decay that ends before the run does, or would end after it."""
    if length > steps:
        return [{"until": steps, "form": form, "final_fraction": final, "decay_until": length}]
    return [{"until": length, "form": form, "final_fraction": final}, {"until": steps, "final_fraction": final}]


def _joint(source: Source) -> dict[str, Any]:
    unit = _unit(source)
    data = None if source.gpus is None else max(1, source.gpus // unit)
    micro = source.get("micro-batch-size")
    settings = batch(global_size=source.get("global-batch-size"), micro=micro, gpus=data, where="Megatron-LM")
    size = settings.get("batch.global_sequences")
    recompute = source.get("recompute-granularity",
                           "selective" if source.get("recompute-activations", False) else None)
    sharded = source.get("use-torch-fsdp2", False) or source.get("use-megatron-fsdp", False) or source.get(
        "use-custom-fsdp", False)
    return {
        **settings, **_model(source), **_schedule(source, size),
        "optimizer.kind": known_optimizer(source.get("optimizer", "adam")),
        "optimizer.betas": [source.get("adam-beta1", 0.9), source.get("adam-beta2", 0.999)],
        "optimizer.weight_decay": float(source.get("weight-decay", 0.01)),
        "optimizer.momentum": source.get("muon-momentum"),
        "precision": _precision(source),
        "parallel.data": "zero3" if sharded else "zero1" if source.get("use-distributed-optimizer", False) else "ddp",
        "memory.activation_checkpointing": {"full": "full", "selective": "attention"}.get(str(recompute)),
        "seed": source.get("seed", 1234), "data.seed": source.get("seed", 1234),
        "metrics.trackers": (["tensorboard"] if source.get("tensorboard-dir") else []) + (
            [{"kind": "wandb", "project": source.get("wandb-project")}] if source.get("wandb-project") else []) or None,
    }


TABLE = read_table("megatron", _joint, {
    "schedules": _SCHEDULES, "decays": _WSD, "minutes": lambda given: 60.0 * given})
