"""torchtitan: the keys of its TOML configuration."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.batch import batch
from tidewheel.imports.optimizer_names import known_optimizer, optimizer
from tidewheel.imports.table import Mapped, Meaningless, Missing, Source, Table, Unavailable, below
from tidewheel.models import families

_PLAIN = {True: True, False: None}
_FLAVORS = {("llama3", "8B"): ("llama", "llama3_8b"), ("llama3", "70B"): ("llama", "llama3_70b"),
            ("llama3", "405B"): ("llama", "llama3_405b"),
            ("qwen3", "0.6B"): ("llama", "qwen3_0.6b"), ("qwen3", "1.7B"): ("llama", "qwen3_1.7b"),
            ("qwen3", "4B"): ("llama", "qwen3_4b"), ("qwen3", "8B"): ("llama", "qwen3_8b"),
            ("qwen3", "14B"): ("llama", "qwen3_14b"), ("qwen3", "32B"): ("llama", "qwen3_32b"),
            ("deepseek_v3", "671B"): ("deepseek_v3", "deepseek_v3")}
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved_1f1b",
              "interleavedzerobubble": "interleaved_zero_bubble", "zbvzerobubble": "zbv_zero_bubble"}
_SOURCE = "shards say their tokens: tidewheel data run, then data.uri"
_TRACES = "traces go to the run's profile/: profile.steps"


def _schedule(given: Any) -> str:
    name = _SCHEDULES.get(str(given).lower())
    if name is None:
        raise Unavailable(f"no pipeline schedule {given}, only {', '.join(_SCHEDULES)}")
    return name


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


TABLE = Table(
    "torchtitan", "torchtitan", "torchtitan/config/job_config.py of releases 0.1 and 0.2, which read TOML",
    formats=("toml",), joint=_joint,
    notes=("Absent keys have torchtitan's defaults, not ours. `--gpus` gives the number of GPUs, which TOML does not "
           "have. Release 0.3 and later configure in Python.",),
    entries=(
        Mapped("job.description", "run.id", lambda given: None, "run.id names the run"),
        Mapped("job.dump_folder", "run.uri"),
        Meaningless("run.json has the configuration; parts are named in it", "job.print_config "
                    "job.custom_config_module job.config_file experimental.* job.use_for_integration_test"),
        Mapped("model.name", "model.preset model.kind", _name, "llama3, qwen3 and deepseek_v3", joint=True),
        Mapped("model.flavor", "model.preset", _flavor, "published sizes", joint=True),
        Meaningless("shards have the tokenizer", "model.hf_assets_path model.tokenizer_path model.norm_type"),
        Mapped("model.converters", "precision", joint=True, note="float8: precision fp8"),
        Meaningless("the model is in run.json", "model.print_after_conversion"),
        Mapped("optimizer.name", "optimizer.kind", optimizer),
        Mapped("optimizer.lr", "optimizer.learning_rate", joint=True),
        Mapped("optimizer.beta1", "optimizer.betas", joint=True),
        Mapped("optimizer.beta2", "optimizer.betas", joint=True),
        Mapped("optimizer.eps", "optimizer.epsilon"),
        Mapped("optimizer.weight_decay", "optimizer.weight_decay", float),
        Meaningless("the device decides the kernel", "optimizer.implementation optimizer.fused"),
        Missing("updates come after the backward pass; those of parallel.offload can come during it: "
                "parallel.overlap_update", "optimizer.early_step_in_backward"),
        Mapped("lr_scheduler.warmup_steps", "schedule.warmup_steps", joint=True),
        Mapped("lr_scheduler.decay_ratio", "schedule.decay_fraction", joint=True, note="kind wsd"),
        Mapped("lr_scheduler.decay_type", "schedule.kind schedule.decay_form",
               {"linear": None, "sqrt": None, "cosine": None},
               "linear or cosine; sqrt, and any form with decay_ratio: wsd of that form", joint=True),
        Mapped("lr_scheduler.min_lr_factor", "schedule.final_fraction", joint=True),
        Mapped("lr_scheduler.lr_min", "schedule.final_fraction", joint=True, note="former name of min_lr_factor"),
        Missing(_SOURCE, "training.dataset training.dataset_path validation.dataset validation.dataset_path"),
        Mapped("training.local_batch_size", "batch.micro_sequences", joint=True),
        Mapped("training.global_batch_size", "batch.global_sequences", joint=True,
               note="-1: local x data-parallel GPUs"),
        Mapped("training.seq_len", "model.max_sequence_length", note="the length of a sequence is the shard set's"),
        Mapped("training.max_norm", "optimizer.clip_norm", float),
        Mapped("training.steps", "steps", joint=True),
        Mapped("training.enable_cpu_offload", "parallel.offload", dict(_PLAIN)),
        Mapped("training.dtype", "parameters", {"bfloat16": "bf16", "float32": None}),
        Mapped("training.mixed_precision_param", "precision", {"bfloat16": "bf16", "float32": None}, joint=True),
        Mapped("training.mixed_precision_reduce", "parallel.reduce_dtype", {"float32": "fp32", "bfloat16": "bf16"}),
        Mapped("training.seed", "seed data.seed"),
        Mapped("training.deterministic", "reproducible", dict(_PLAIN)),
        Meaningless("Python collects its garbage", "training.gc_freq training.gc_debug"),
        Missing("a test's setting", "training.debug_moe_force_load_balance"),
        Mapped("parallelism.data_parallel_replicate_degree", "parallel.replicate", joint=True),
        Mapped("parallelism.data_parallel_shard_degree", "parallel.data batch.virtual_ranks", joint=True,
               note="1: ddp; -1: the rest of the GPUs"),
        Mapped("parallelism.fsdp_reshard_after_forward", "parallel.data", {
            "default": "zero3", "always": "zero3", "never": "zero2"}, joint=True),
        Mapped("parallelism.tensor_parallel_degree", "parallel.tensor"),
        Mapped("parallelism.enable_async_tensor_parallel", "parallel.async_tensor", dict(_PLAIN)),
        Mapped("parallelism.pipeline_parallel_degree", "parallel.pipeline"),
        Mapped("parallelism.pipeline_parallel_schedule", "parallel.pipeline_schedule", _schedule,
               "1F1B, GPipe, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble"),
        Mapped("parallelism.context_parallel_degree", "parallel.context"),
        Mapped("parallelism.context_parallel_rotate_method", "parallel.context_method",
               {"allgather": "all_gather", "alltoall": "ring"}, "alltoall passes keys around, as ring does here"),
        Mapped("parallelism.expert_parallel_degree", "parallel.expert"),
        Missing("experts are not cut by tensor parallelism", "parallelism.expert_tensor_parallel_degree", off=(1,)),
        Meaningless("stages are balanced by cost, and the micro-batch is batch.micro_sequences", below("parallelism", (
            "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_split_points "
            "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage "
            "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size"))),
        Missing("not chosen by hand", "parallelism.enable_compiled_autograd parallelism.disable_loss_parallel"),
        Mapped("checkpoint.enable", "checkpoint.every_steps", joint=True),
        Mapped("checkpoint.enable_checkpoint", "checkpoint.every_steps", joint=True, note="former name of enable"),
        Mapped("checkpoint.interval", "checkpoint.every_steps", joint=True),
        Mapped("checkpoint.keep_latest_k", "checkpoint.keep_last", lambda given: given or None),
        Mapped("checkpoint.async_mode", "checkpoint.asynchronous", {
            "disabled": False, "async": None, "async_with_pinned_mem": None}),
        Mapped("checkpoint.initial_load_path", "model.init_from"),
        Meaningless("checkpoints hold the whole state; tidewheel checkpoint export writes Hugging Face's format",
                    below("checkpoint", (
                        "enable_ft_dataloader_checkpoints folder initial_load_model_only initial_load_in_hf "
                        "initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype load_step "
                        "exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only "
                        "model_weights_only"))),
        Mapped("activation_checkpoint.mode", "memory.activation_checkpointing", {
            "selective": "selective", "full": "full", "none": None}, joint=True),
        Mapped("activation_checkpoint.selective_ac_option", "memory.activation_checkpointing memory.every", joint=True,
               note="op: selective; a number n: every_nth"),
        Meaningless("memory says what is kept", below("activation_checkpoint", (
            "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget visualize_memory_budget_pareto"))),
        Mapped("compile.enable", "compile", dict(_PLAIN), joint=True),
        Meaningless("blocks are compiled with torch's default backend", "compile.components compile.backend "
                    "training.compile"),
        Mapped("quantize.linear.float8.recipe_name", "fp8.recipe", {"tensorwise": "tensorwise", "rowwise": "rowwise"}),
        Mapped("quantize.linear.float8.enable_fsdp_float8_all_gather", "fp8.all_gather", dict(_PLAIN)),
        Mapped("quantize.linear.float8.emulate", "fp8.emulate", dict(_PLAIN)),
        Mapped("float8.recipe_name", "fp8.recipe", {"tensorwise": "tensorwise", "rowwise": "rowwise"}),
        Mapped("float8.enable_fsdp_float8_all_gather", "fp8.all_gather", dict(_PLAIN)),
        Meaningless("fp8.layers chooses layers by their size; scales are computed once for all",
                    "quantize.linear.float8.filter_fqns float8.filter_fqns "
                    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp "
                    "float8.precompute_float8_dynamic_scale_for_fsdp float8.force_recompute_fp8_weight_in_bwd "
                    "float8.moe_fqns_prototype"),
        Missing("no MX formats, and experts are not quantised", "quantize.linear.mx.* quantize.grouped_mm.* mx.*"),
        Mapped("comm.init_timeout_seconds", "guards.start_timeout_seconds"),
        Mapped("comm.train_timeout_seconds", "guards.collective_timeout_seconds"),
        Meaningless("a rank that hangs is named, with its stack, in events.jsonl",
                    "comm.trace_buf_size comm.save_traces_folder comm.save_traces_file_prefix"),
        Mapped("metrics.log_freq", "metrics.every_steps", joint=True),
        Mapped("metrics.enable_tensorboard", "metrics.trackers", joint=True),
        Mapped("metrics.enable_wandb", "metrics.trackers", joint=True),
        Meaningless("one line of metrics for the whole run", below("metrics", (
            "disable_color_printing save_tb_folder save_for_all_ranks rank_0_only"))),
        Meaningless(_TRACES, below("profiling", (
            "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
            "save_memory_snapshot_folder"))),
        Mapped("profiling.enable_memory_snapshot", "profile.memory", dict(_PLAIN)),
        Mapped("validation.enable", "evaluation.every_steps", joint=True),
        Mapped("validation.freq", "evaluation.every_steps", joint=True),
        Meaningless("validation takes its whole set, in the run's micro-batches",
                    "validation.local_batch_size validation.seq_len validation.steps"),
        Meaningless("tidewheel plan estimates memory", "memory_estimation.*"),
        Meaningless("every run survives the loss of workers", below("fault_tolerance", (
            "enable process_group process_group_timeout_ms replica_id group_size min_replica_size"))),
        Missing("set outer, for local SGD and DiLoCo", "fault_tolerance.semi_sync_method"),
    ),
)
