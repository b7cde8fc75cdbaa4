"""Megatron-LM: the command-line arguments of pretrain_gpt.py."""

from __future__ import annotations

from typing import Any

from tidewheel.imports import megatron_names as names
from tidewheel.imports.batch import batch
from tidewheel.imports.optimizer_names import known_optimizer, optimizer
from tidewheel.imports.table import Mapped, Meaningless, Missing, Source, Table, Unavailable

_SWITCH = {True: True, False: None}
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
_WSD = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}


def _is_gpt2(source: Source) -> bool:
    return not source.get("swiglu", False) and not _is_rotary(source)


def _is_rotary(source: Source) -> bool:
    return source.get("position-embedding-type") == "rope" or source.get("use-rotary-position-embeddings", False)


def _like_a_family(given: Any) -> None:
    """Take a switch of the model's form, which `_model` reads."""


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
        "precision": "fp8" if source.get("fp8-format") else "fp16" if source.get("fp16", False) else
        "bf16" if source.get("bf16", False) else None,
        "parallel.data": "zero3" if sharded else "zero1" if source.get("use-distributed-optimizer", False) else "ddp",
        "memory.activation_checkpointing": {"full": "full", "selective": "attention"}.get(str(recompute)),
        "seed": source.get("seed", 1234), "data.seed": source.get("seed", 1234),
        "metrics.trackers": (["tensorboard"] if source.get("tensorboard-dir") else []) + (
            [{"kind": "wandb", "project": source.get("wandb-project")}] if source.get("wandb-project") else []) or None,
    }


def _only(*allowed: Any) -> Any:
    def check(given: Any) -> None:
        if given not in allowed:
            raise Unavailable(f"{given} is no family's, only {', '.join(map(str, allowed))}")
    return check


TABLE = Table(
    "megatron", "Megatron-LM", "megatron/training/arguments.py (core 0.13 and the main branch of August 2026)",
    formats=("arguments", "yaml"), joint=_joint,
    notes=("A shell line or a file of arguments; everything before the first `--name` is ignored, and variables must "
           "be filled in. The model is `gpt2` with learned positions and GELU, `llama` with RoPE, and `mixtral`, "
           "`qwen3_moe` or `deepseek_v3` with experts. Without `--use-distributed-optimizer` the layout is ddp.",),
    entries=(
        # model
        Mapped("num-layers", "model.num_layers"), Mapped("hidden-size", "model.dim"),
        Mapped("ffn-hidden-size", "model.ffn_dim"), Mapped("num-attention-heads", "model.num_heads"),
        Mapped("group-query-attention", "model.num_kv_heads", joint=True, note="with num-query-groups"),
        Mapped("num-query-groups", "model.num_kv_heads", joint=True), Mapped("kv-channels", "model.head_dim"),
        Mapped("max-position-embeddings", "model.max_sequence_length"),
        Mapped("position-embedding-type", "model.kind", _only("rope", "learned_absolute"),
               "rope: llama, learned_absolute: gpt2", joint=True),
        Mapped("use-rotary-position-embeddings", "model.kind", _like_a_family, "llama", joint=True),
        Mapped("rotary-base", "model.rope_theta", joint=True),
        Mapped("swiglu", "model.kind", _like_a_family, "llama; without: gpt2", joint=True),
        Mapped("normalization", "model.kind", _only("RMSNorm", "LayerNorm"), "RMSNorm: llama, LayerNorm: gpt2",
               joint=True),
        Mapped("disable-bias-linear", "model.kind", _like_a_family, "llama has no biases, gpt2 has", joint=True),
        Mapped("untie-embeddings-and-output-weights", "model.tie_embeddings", joint=True, note="false"),
        Mapped("qk-layernorm", "model.qk_norm", joint=True), Mapped("norm-epsilon", "model.norm_epsilon", joint=True),
        Mapped("init-method-std", "model.init_std", joint=True), Mapped("vocab-size", "model.vocabulary_size"),
        Mapped("num-experts", "model.num_experts"), Mapped("moe-router-topk", "model.experts_per_token"),
        Mapped("moe-ffn-hidden-size", "model.expert_ffn_dim"),
        Mapped("moe-aux-loss-coeff", "model.auxiliary_loss"), Mapped("moe-z-loss-coeff", "model.router_z_loss"),
        Mapped("moe-router-bias-update-rate", "model.balancing_rate"),
        Mapped("moe-router-enable-expert-bias", "model.balancing", {True: "bias", False: None}),
        Mapped("moe-router-load-balancing-type", "model.balancing", {"aux_loss": "auxiliary", "none": "none",
                                                                     "seq_aux_loss": "auxiliary"}),
        Mapped("moe-router-num-groups", "model.expert_groups"),
        Mapped("moe-router-group-topk", "model.groups_per_token"),
        Mapped("moe-router-topk-scaling-factor", "model.weight_scale", float),
        Mapped("multi-latent-attention", "model.kind", _like_a_family, "deepseek_v3", joint=True),
        Mapped("q-lora-rank", "model.query_rank"), Mapped("kv-lora-rank", "model.key_rank"),
        Mapped("qk-head-dim", "model.plain_head_dim"), Mapped("qk-pos-emb-head-dim", "model.turning_head_dim"),
        Mapped("v-head-dim", "model.value_head_dim"),
        Missing("families have no dropout", "attention-dropout hidden-dropout", off=(0, 0.0)),
        Missing("no built-in family has this form; tw.Model is open for your own", (
            "squared-relu openai-gelu quick-geglu apply-layernorm-1p apply-residual-connection-post-layernorm "
            "add-qkv-bias rotary-interleaved no-position-embedding no-rope-freq qk-l2-norm window-size "
            "window-attn-skip-freq init-method-xavier-uniform moe-router-pre-softmax moe-apply-probs-on-input "
            "moe-shared-expert-intermediate-size moe-router-score-function moe-input-jitter-eps "
            "moe-router-force-load-balancing moe-expert-capacity-factor moe-pad-expert-input-to-capacity "
            "moe-token-drop-policy rotary-seq-len-interpolation-factor")),
        Missing("set model.rope_scaling", (
            "use-rope-scaling rope-scaling-factor rotary-scaling-factor mscale mscale-all-dim "
            "yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow yarn-correction-range-round-to-int "
            "no-yarn-correction-range-round-to-int")),
        Missing("the whole head turns", "rotary-percent", off=(1, 1.0)),
        Missing("models are decoders of text", names.OTHER_MODELS),
        # batch, length, data
        Mapped("micro-batch-size", "batch.micro_sequences", joint=True),
        Mapped("global-batch-size", "batch.global_sequences", joint=True),
        Missing("set batch.ramp, in tokens", "rampup-batch-size decrease-batch-size-if-needed"),
        Mapped("train-iters", "steps", joint=True),
        Mapped("train-samples", "steps", joint=True, note="/ global-batch-size"),
        Meaningless("the length of a sequence is the shard set's", "seq-length"),
        Meaningless("shards hold packed, masked sequences and their tokenizer: tidewheel data run, then data.uri",
                    names.DATA),
        Mapped("eval-interval", "evaluation.every_steps"),
        # optimizer
        Mapped("optimizer", "optimizer.kind", optimizer, "adam is AdamW"),
        Mapped("lr", "optimizer.learning_rate"), Mapped("weight-decay", "optimizer.weight_decay", joint=True),
        Mapped("adam-beta1", "optimizer.betas", joint=True), Mapped("adam-beta2", "optimizer.betas", joint=True),
        Mapped("adam-eps", "optimizer.epsilon"), Mapped("clip-grad", "optimizer.clip_norm", float),
        Mapped("muon-momentum", "optimizer.momentum", joint=True), Mapped("sgd-momentum", "optimizer.momentum"),
        Mapped("lr-decay-style", "schedule.kind", dict(_SCHEDULES),
               "constant, linear, cosine, or WSD: wsd, linear unless lr-wsd-decay-style says more", joint=True),
        Mapped("min-lr", "schedule.final_fraction", joint=True, note="/ lr"),
        Mapped("lr-warmup-iters", "schedule.warmup_steps", joint=True),
        Mapped("lr-warmup-samples", "schedule.warmup_steps", joint=True),
        Mapped("lr-warmup-fraction", "schedule.warmup_steps", joint=True),
        Mapped("lr-wsd-decay-iters", "schedule.decay_fraction", joint=True, note="/ train-iters"),
        Mapped("lr-wsd-decay-samples", "schedule.decay_fraction", joint=True, note="/ train-samples"),
        Mapped("lr-wsd-decay-style", "schedule.decay_form", dict(_WSD), joint=True),
        Mapped("lr-decay-iters", "schedule.kind", joint=True, note="piecewise if it is not train-iters"),
        Mapped("lr-decay-samples", "schedule.kind", joint=True, note="piecewise if it is not train-samples"),
        Missing("the warm-up starts from 0", "lr-warmup-init warmup"),
        Missing("not a setting of our optimizers", (
            "decoupled-lr decoupled-min-lr start-weight-decay end-weight-decay weight-decay-incr-style "
            "no-weight-decay-cond-type apply-wd-to-qk-layernorm muon-no-split-qkv muon-nesterov muon-scale-mode "
            "muon-coefficient-type muon-num-ns-steps muon-extra-scale-factor muon-scalar-optimizer lion-beta1 "
            "lion-beta2 freeze-all-layers iterations-to-skip"), off=(None, "constant", False)),
        Meaningless("orthogonalisation gathers whole matrices", "muon-fp32-matmul-prec muon-tp-mode muon-use-syrk"),
        # precision
        Mapped("bf16", "precision", {True: "bf16", False: None}, joint=True),
        Mapped("fp16", "precision", {True: "fp16", False: None}, joint=True),
        Mapped("fp8-format", "precision", lambda given: "fp8", joint=True),
        Mapped("fp8-recipe", "fp8.recipe", {"tensorwise": "tensorwise", "delayed": "tensorwise"}),
        Meaningless("fp8 scales follow from the values, and the loss scale adapts itself", (
            "fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo no-fp8-wgrad loss-scale "
            "initial-loss-scale min-loss-scale loss-scale-window hysteresis moe-router-padding-for-fp8 "
            "moe-router-dtype fp16-lm-cross-entropy")),
        Missing("fp8 layers are those that gain: fp8.layers", "first-last-layers-bf16 num-layers-at-start-in-bf16 "
                "num-layers-at-end-in-bf16"),
        Missing("optimizer state is fp32; adamw8bit has 8-bit moments", "use-precision-aware-optimizer "
                "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype", off=(False, None, "fp32")),
        Mapped("grad-reduce-in-bf16", "parallel.reduce_dtype", {True: "bf16", False: None}),
        Meaningless("means are over the tokens of the global batch", "calculate-per-token-loss"),
        # layout
        Mapped("tensor-model-parallel-size", "parallel.tensor"),
        Mapped("pipeline-model-parallel-size", "parallel.pipeline"),
        Mapped("context-parallel-size", "parallel.context"),
        Mapped("expert-model-parallel-size", "parallel.expert"),
        Mapped("cp-comm-type", "parallel.context_method", {"p2p": "ring", "all_gather": "all_gather",
                                                           "a2a": "all_to_all"}),
        Mapped("num-virtual-stages-per-pipeline-rank", "parallel.pipeline_stages"),
        Mapped("tp-comm-overlap", "parallel.async_tensor", dict(_SWITCH)),
        Mapped("use-distributed-optimizer", "parallel.data", {True: "zero1", False: None}, joint=True),
        Mapped("use-torch-fsdp2", "parallel.data", {True: "zero3", False: None}, joint=True),
        Mapped("use-megatron-fsdp", "parallel.data", {True: "zero3", False: None}, joint=True),
        Missing("use-torch-fsdp2 decides", "data-parallel-sharding-strategy torch-fsdp2-no-reshard-after-forward",
                off=(False, "no_shard", "optim_grads_params")),
        Mapped("optimizer-cpu-offload", "parallel.offload", dict(_SWITCH), "with FSDP2 alone"),
        Meaningless("FSDP2 manages the copies to the host", "optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d "
                    "use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params"),
        Meaningless("tensor parallelism always shares sequences too", "sequence-parallel"),
        Missing("experts are not cut by tensor parallelism", "expert-tensor-parallel-size", off=(1, None)),
        Meaningless("stages are balanced by cost", (
            "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout "
            "num-layers-per-virtual-pipeline-stage account-for-embedding-in-pipeline-split "
            "account-for-loss-in-pipeline-split pipeline-model-parallel-split-rank model-parallel-size batch-size")),
        Mapped("recompute-granularity", "memory.activation_checkpointing", {"full": "full", "selective": "attention"},
               joint=True),
        Mapped("recompute-activations", "memory.activation_checkpointing", {True: "attention", False: None},
               joint=True),
        Meaningless("memory.activation_checkpointing says which blocks and what of them", (
            "recompute-method recompute-num-layers recompute-modules checkpoint-activations moe-layer-recompute")),
        Mapped("deterministic-mode", "reproducible", dict(_SWITCH)),
        Mapped("distributed-timeout-minutes", "guards.collective_timeout_seconds", lambda given: 60.0 * given),
        Mapped("no-check-for-nan-in-loss-and-grad", "guards.non_finite", lambda given: None, "guards decide"),
        Mapped("check-for-spiky-loss", "guards.spike", {True: "skip", False: None}),
        Meaningless("guards judge the norm too", "check-for-large-grads"),
        # run
        Mapped("seed", "seed data.seed", joint=True), Mapped("save", "run.uri"),
        Mapped("save-interval", "checkpoint.every_steps"),
        Mapped("load", "run.uri", lambda given: None, "a run resumes by its run.id"),
        Mapped("pretrained-checkpoint", "model.init_from"),
        Mapped("log-interval", "metrics.every_steps"),
        Mapped("tensorboard-dir", "metrics.trackers", joint=True),
        Mapped("wandb-project", "metrics.trackers", joint=True), Mapped("wandb-exp-name", "run.id"),
        Mapped("logging-level", "logs.level", {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}),
        Meaningless("kernels and what is fused follow from the device, model.attention and compile", names.FUSIONS),
        Meaningless("torch's FSDP2, pipelines and symmetric memory overlap by themselves", names.COMMUNICATION),
        Meaningless("checkpoints are sharded, asynchronous, in memory too, and load under any layout",
                    names.CHECKPOINTS),
        Meaningless("a run starts, stops, resumes and survives failures by itself", names.STARTS),
        Meaningless("metrics.jsonl, events.jsonl and the report have it; profile.steps traces", names.LOGS),
        Missing("post-training has its own settings: objective and rollouts", names.POST_TRAINING),
        Meaningless("tidewheel generate and rollouts generate", names.INFERENCE),
    ),
)
