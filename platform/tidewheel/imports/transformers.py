"""Hugging Face transformers: the fields of TrainingArguments, as JSON."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.batch import batch, warmup
from tidewheel.imports.optimizer_names import known_optimizer, optimizer
from tidewheel.imports.table import Mapped, Meaningless, Missing, Source, Table, Unavailable, below

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
              "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
_KWARGS = ("min_lr", "min_lr_rate", "min_lr_ratio", "num_decay_steps", "decay_type")
_PLAIN = {True: True, False: None}
_TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}


def schedule(given: Any) -> str:
    """Return our schedule of a SchedulerType.

    Raises:
        Unavailable: there is none.
    """
    if str(given) not in _SCHEDULES:
        raise Unavailable(f"no schedule {given}, only {', '.join(_SCHEDULES)}; piecewise gives others")
    return _SCHEDULES[str(given)]


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


_LOADER = "shards are packed and read ahead without loader processes: data.prefetch"
_HUB = "tidewheel checkpoint export writes a Hugging Face folder to upload"
_SCRIPT = "the command says what to do: tidewheel train, evaluate, generate"

TABLE = Table(
    "transformers", "Hugging Face transformers", "TrainingArguments of transformers 4 and 5",
    formats=("json", "yaml"), joint=_joint,
    notes=("Absent keys have the defaults of TrainingArguments, not ours: learning rate 5e-5, no weight decay, a "
           "linear decay to 0, seed 42, 8 sequences per device. `--gpus` gives the number of devices.",),
    entries=(
        Mapped("per_device_train_batch_size", "batch.micro_sequences", joint=True),
        Mapped("per_gpu_train_batch_size", "batch.micro_sequences", joint=True),
        Mapped("gradient_accumulation_steps", "batch.global_sequences", joint=True,
               note="micro-batch x accumulation x GPUs"),
        Mapped("max_steps", "steps", joint=True),
        Missing("a run has a number of steps: rows of the set x epochs / batch.global_sequences, as --set steps=...",
                "num_train_epochs"),
        Mapped("learning_rate", "optimizer.learning_rate", joint=True),
        Mapped("optim", "optimizer.kind", optimizer, "AdamW's variants are one; the device chooses the kernel"),
        Mapped("weight_decay", "optimizer.weight_decay", joint=True),
        Mapped("adam_beta1", "optimizer.betas", joint=True),
        Mapped("adam_beta2", "optimizer.betas", joint=True),
        Mapped("adam_epsilon", "optimizer.epsilon"),
        Mapped("max_grad_norm", "optimizer.clip_norm", joint=True),
        Mapped("adafactor", "optimizer.kind", {True: "adafactor", False: None}),
        Missing("optimizers have their settings under optimizer", "optim_args optim_target_modules"),
        Mapped("lr_scheduler_type", "schedule.kind", schedule, "linear, cosine, constant, cosine_with_min_lr, "
               "warmup_stable_decay (wsd); others are not available"),
        Mapped("lr_scheduler_kwargs", "schedule.final_fraction schedule.decay_steps schedule.decay_form", _kwargs,
               "min_lr_rate, min_lr_ratio, or min_lr / learning_rate; num_decay_steps and decay_type of "
               "warmup_stable_decay", joint=True),
        Mapped("warmup_steps", "schedule.warmup_steps", joint=True, note="below 1: a share of max_steps"),
        Mapped("warmup_ratio", "schedule.warmup_steps", joint=True, note="x max_steps"),
        Mapped("bf16", "precision", {True: "bf16", False: None}, joint=True),
        Mapped("fp16", "precision", {True: "fp16", False: None}, joint=True),
        Mapped("tf32", "tf32"),
        Meaningless("evaluation computes in the run's precision", "bf16_full_eval fp16_full_eval"),
        Meaningless("torch casts; apex is gone", "fp16_opt_level fp16_backend half_precision_backend"),
        Mapped("gradient_checkpointing", "memory.activation_checkpointing", {True: "full", False: None}),
        Mapped("activation_checkpointing", "memory.activation_checkpointing", {True: "full", False: None}),
        Meaningless("blocks recompute without reentrant autograd; memory has the kinds",
                    "gradient_checkpointing_kwargs activation_checkpointing_kwargs"),
        Mapped("torch_compile", "compile", _PLAIN),
        Missing("torch.compile's default backend and mode", "torch_compile_backend torch_compile_mode torchdynamo",
                off=(None, "", "inductor", "default")),
        Mapped("neftune_noise_alpha", "neftune_alpha", float),
        Missing("labels are not smoothed", "label_smoothing_factor"),
        Meaningless("the loss is chunked by itself, and blocks have fused kernels", "use_liger_kernel "
                    "liger_kernel_config use_cache"),
        Meaningless("means are over the tokens of the global batch, on every number of devices",
                    "average_tokens_across_devices"),
        Meaningless("allocators keep their memory; tidewheel plan finds the batch that fits",
                    "torch_empty_cache_steps auto_find_batch_size"),
        # logs
        Mapped("logging_steps", "metrics.every_steps", lambda given: _whole(given)),
        Mapped("log_level", "logs.level", {"debug": "debug", "info": "info", "warning": "warning", "error": "error",
                                           "critical": "critical", "passive": None}),
        Mapped("report_to", "metrics.trackers", _trackers, "tensorboard and wandb; others are not available"),
        Mapped("run_name", "run.id"),
        Mapped("output_dir", "run.uri"),
        Meaningless("every step is in metrics.jsonl, the first too, on one console",
                    "logging_strategy logging_first_step log_on_each_node log_level_replica disable_tqdm logging_dir "
                    "include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics project "
                    "trackio_space_id trackio_bucket_id trackio_static_space_id"),
        Meaningless("a loss that is not finite is shown, and guards decide", "logging_nan_inf_filter debug"),
        # evaluation
        Mapped("eval_strategy", "evaluation.every_steps", {"steps": None, "no": None, "epoch": None},
               "steps: with eval_steps; else at the end only", joint=True),
        Mapped("evaluation_strategy", "evaluation.every_steps", {"steps": None, "no": None, "epoch": None},
               "former name of eval_strategy", joint=True),
        Mapped("eval_steps", "evaluation.every_steps", _whole, joint=True),
        Meaningless("evaluation takes the run's micro-batches and needs no metrics function", (
            "per_device_eval_batch_size per_gpu_eval_batch_size prediction_loss_only eval_do_concat_batches "
            "eval_use_gather_object eval_accumulation_steps include_for_metrics include_inputs_for_metrics "
            "batch_eval_metrics metric_for_best_model greater_is_better")),
        Missing("the first evaluation is at the first multiple of evaluation.every_steps", "eval_delay eval_on_start"),
        # checkpoints
        Mapped("save_strategy", "checkpoint.every_steps", {"steps": None, "no": None, "epoch": None, "best": None},
               "steps: with save_steps; else at the end only", joint=True),
        Mapped("save_steps", "checkpoint.every_steps", _whole, joint=True),
        Mapped("save_total_limit", "checkpoint.keep_last"),
        Mapped("load_best_model_at_end", "checkpoint.keep_best", joint=True, note="the best checkpoint is kept"),
        Mapped("resume_from_checkpoint", "model.init_from", lambda given: None,
               "a run resumes by its run.id; model.init_from starts from other weights"),
        Meaningless("checkpoints hold the whole state, sharded, as safetensors, and a notice saves first", (
            "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint ignore_data_skip "
            "restore_callback_states_from_checkpoint overwrite_output_dir")),
        Meaningless(_HUB, "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
                    "hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token"),
        # data
        Mapped("seed", "seed", joint=True),
        Mapped("data_seed", "data.seed", joint=True),
        Mapped("full_determinism", "reproducible", _PLAIN),
        Mapped("group_by_length", "batch.group_by_length", {False: None},
               "with batch.pad_to_multiple_of; packed rows need no grouping"),
        Mapped("train_sampling_strategy", "data.seed", {"random": None, "group_by_length": None},
               "the order is a keyed permutation"),
        Mapped("dataloader_prefetch_factor", "data.prefetch"),
        Meaningless(_LOADER, "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
                    "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order "
                    "remove_unused_columns label_names length_column_name dispatch_batches split_batches"),
        # devices and layout
        Mapped("use_cpu", "elastic.gpus_per_worker", {True: 0, False: None}),
        Mapped("no_cuda", "elastic.gpus_per_worker", {True: 0, False: None}),
        Mapped("ddp_timeout", "guards.collective_timeout_seconds", lambda given: None,
               "ranks that hang are cut off after guards.collective_timeout_seconds, 100 s by default"),
        Meaningless("every parameter of a model has a gradient; buckets and backend follow from the device",
                    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
                    "local_rank tpu_num_cores tpu_metrics_debug use_mps_device use_ipex ray_scope mp_parameters "
                    "past_index jit_mode_eval xpu_backend"),
        Mapped("fsdp", "parallel.data parallel.offload", joint=True,
               note="full_shard: zero3, shard_grad_op: zero2, offload: parallel.offload; none: ddp"),
        Mapped("fsdp_config.activation_checkpointing", "memory.activation_checkpointing", {True: "full", False: None}),
        Meaningless("each block is a unit of FSDP2, gathered ahead, and saved in shards", below("fsdp_config", (
            "version min_num_params transformer_layer_cls_to_wrap auto_wrap_policy backward_prefetch forward_prefetch "
            "limit_all_gathers use_orig_params sync_module_states cpu_ram_efficient_loading state_dict_type "
            "reshard_after_forward fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap fsdp_version")) +
            " fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap"),
        Missing("the model runs on CPU and GPU, not on XLA", below("fsdp_config", (
            "xla xla_fsdp_settings xla_fsdp_grad_ckpt xla_fsdp_v2"))),
        Missing("import that file too: tidewheel import-config deepspeed", "deepspeed deepspeed.* sharded_ddp"),
        Missing("give the content of that file", "fsdp_config parallelism_config"),
        Mapped("parallelism_config.tp_size", "parallel.tensor"),
        Mapped("parallelism_config.cp_size", "parallel.context"),
        Mapped("parallelism_config.dp_replicate_size", "parallel.replicate"),
        Meaningless("the rest of the workers is data parallel", "parallelism_config.dp_shard_size"),
        Missing("Ulysses is parallel.context_method all_to_all, with parallel.context",
                "parallelism_config.sp_size", off=(1, None)),
        Meaningless("see parallel.context_method", "parallelism_config.*"),
        Meaningless(_LOADER, "accelerator_config accelerator_config.*"),
        Meaningless(_SCRIPT, "do_train do_eval do_predict use_legacy_prediction_loop"),
    ),
)
