"""DeepSpeed: the keys of ds_config.json."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.batch import batch
from tidewheel.imports.optimizer_names import known_optimizer, optimizer
from tidewheel.imports.table import Mapped, Meaningless, Missing, Source, Table, Unavailable, below

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OFFLOAD = {"cpu": True, "none": None}
_NVME = "/local_nvme"
_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_FLOATS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfp16": "bf16", "bfloat16": "bf16"}
_BUCKETS = "FSDP2 gathers and reduces block by block; there are no buckets to size"
_ONE_BIT = "1-bit Adam and LAMB are not built in; compression.kind one_bit sends the signs of gradients"
_COMPRESSION = "no compression of weights or activations while training"
_WHOLE = "choose the format at export: tidewheel checkpoint export"
_MEASURED = "always measured: metrics.jsonl and the report have times, tokens/s and MFU"


def _linear_warmup(given: Any) -> None:
    if str(given) != "linear":
        raise Unavailable("the warm-up is linear")


def _dynamic(given: Any) -> None:
    if given:
        raise Unavailable(f"the loss scale is dynamic; {given} would fix it")


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


TABLE = Table(
    "deepspeed", "DeepSpeed", "https://www.deepspeed.ai/docs/config-json/ (0.19) and its pydantic models",
    formats=("json",), joint=_joint,
    notes=("A value `auto` takes our default, or follows from the other keys. Without `scheduler` the learning rate is "
           "constant, as in DeepSpeed. Other absent keys have our defaults: a clip norm of 1 (DeepSpeed: none), weight "
           "decay of 0.1 (0), betas of 0.9 and 0.95 (0.999). The model, the data and the number of steps are not in "
           "this file: give them with `--set`.",),
    entries=(
        # batch
        Mapped("train_batch_size", "batch.global_sequences", joint=True),
        Mapped("train_micro_batch_size_per_gpu", "batch.micro_sequences", joint=True),
        Mapped("gradient_accumulation_steps", "batch.virtual_ranks", joint=True,
               note="global batch / (micro-batch x accumulation): the GPUs of the run; how many there are later does "
                    "not matter"),
        Meaningless("gradients are always added up over the micro-batches of a step", "managed_gradient_accumulation"),
        # optimizer
        Mapped("optimizer.type", "optimizer.kind", optimizer, "Adam is AdamW unless adam_w_mode is false",
               joint=True),
        Mapped("optimizer.params.lr", "optimizer.learning_rate", joint=True),
        Mapped("optimizer.params.muon_lr", "optimizer.learning_rate", joint=True),
        Mapped("optimizer.params.betas", "optimizer.betas"),
        Mapped("optimizer.params.eps", "optimizer.epsilon"),
        Mapped("optimizer.params.weight_decay", "optimizer.weight_decay", float,
               "norms, biases and embeddings never decay here"),
        Mapped("optimizer.params.momentum", "optimizer.momentum"),
        Mapped("optimizer.params.max_grad_norm", "optimizer.clip_norm", float),
        Mapped("gradient_clipping", "optimizer.clip_norm", float),
        Mapped("optimizer.params.adam_w_mode", "optimizer.kind", {True: None, False: "adam"},
               "false: the decay is L2 in the gradient", joint=True),
        Missing("AdamW corrects the bias", "optimizer.params.bias_correction", off=(True, None)),
        Missing("one learning rate for all parameters", "optimizer.params.adam_lr"),
        Missing("AMSGrad is not built in", "optimizer.params.amsgrad"),
        Missing(_ONE_BIT, below("optimizer.params", (
            "freeze_step var_freeze_step var_update_scaler local_step_scaler local_step_clipper coeff_beta factor_max "
            "factor_min factor_threshold"))),
        Missing("not a setting of our LAMB", "optimizer.params.max_coeff optimizer.params.min_coeff"),
        Meaningless("the device decides which kernel an optimizer uses", below("optimizer.params", (
            "torch_adam cuda_aware comm_backend_name ns_method set_grad_none fp32_optimizer_states fused foreach")) +
            " optimizer.legacy_fusion zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
        # schedule
        Mapped("scheduler.type", "schedule.kind", dict(_SCHEDULES), joint=True),
        Mapped("scheduler.params.warmup_num_steps", "schedule.warmup_steps", joint=True),
        Mapped("scheduler.params.warmup_max_lr", "optimizer.learning_rate", joint=True),
        Mapped("scheduler.params.total_num_steps", "steps", int, "the run's length"),
        Mapped("scheduler.params.cos_min_ratio", "schedule.final_fraction", joint=True),
        Mapped("scheduler.params.warmup_type", "schedule.warmup_steps", _linear_warmup, "linear; log is not available"),
        Missing("the warm-up starts from 0", below("scheduler.params", "warmup_min_lr warmup_min_ratio")),
        Missing("there is no one-cycle schedule and no range test; tw.Schedule is open for your own", below(
            "scheduler.params", (
                "lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size lr_range_test_staircase "
                "edge_value mid_value cycle_first_step_size cycle_first_stair_count cycle_second_step_size "
                "cycle_second_stair_count decay_step_size cycle_min_lr cycle_max_lr decay_lr_rate cycle_min_mom "
                "cycle_max_mom decay_mom_rate"))),
        Meaningless("a resumed run knows its step", "scheduler.params.last_batch_iteration"),
        # precision
        Mapped("fp16.enabled", "precision", {True: "fp16", False: None}, joint=True),
        Mapped("bf16.enabled", "precision", {True: "bf16", False: None}, joint=True),
        Mapped("bfloat16.enabled", "precision", {True: "bf16", False: None}, joint=True),
        Mapped("torch_autocast.enabled", "precision", {True: "bf16", False: None}, "with dtype", joint=True),
        Mapped("torch_autocast.dtype", "precision", {"bfloat16": "bf16", "float16": "fp16"}, joint=True),
        Mapped("fp16.loss_scale", "precision", _dynamic, "0: the dynamic scale of fp16; any other is not available"),
        Mapped("bf16.bf16_master_weights_and_grads", "parameters", {False: None}),
        Mapped("bf16.bf16_optimizer_states", "optimizer.kind", {False: None}),
        Missing("the master weights are fp32", "fp16.fp16_master_weights_and_grads"),
        Meaningless("the dynamic loss scale adapts itself; a step that overflows is skipped and recorded",
                    below("fp16", ("initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
                                   "min_loss_scale auto_cast")) + " check_overflow bf16.check_grad_overflow"),
        Meaningless("gradients are fp32 and ready at the update", "bf16.immediate_grad_update"),
        Meaningless("norms, the loss and reductions stay fp32 by themselves",
                    "torch_autocast.lower_precision_safe_modules"),
        Missing("apex is superseded: set precision", "amp.enabled amp.opt_level"),
        Mapped("communication_data_type", "parallel.reduce_dtype", dict(_FLOATS)),
        Meaningless("sequence parallelism sends what precision says", "seq_parallel_communication_data_type"),
        Mapped("data_types.grad_accum_dtype", "parallel.reduce_dtype", {"fp32": None}, "always fp32"),
        Meaningless("precision and parameters decide it", "data_types.param_dtype data_types.buffer_dtype"),
        # ZeRO
        Mapped("zero_optimization.stage", "parallel.data", dict(_STAGES), joint=True,
               note="0: ddp, 1: zero1 (with offload zero2), 2: zero2, 3: zero3"),
        Mapped("zero_optimization.offload_optimizer.device", "parallel.offload", {**_OFFLOAD, "nvme": True},
               "cpu and nvme: true, with the parameters", joint=True),
        Mapped("zero_optimization.offload_optimizer.nvme_path",
               "memory.optimizer_disk checkpoint.memory_tier",
               note="with device nvme; without a path /local_nvme", joint=True),
        Mapped("zero_optimization.offload_param.device", "parallel.offload", dict(_OFFLOAD),
               "cpu: true, with the optimizer; nvme is not available", joint=True),
        Mapped("zero_optimization.cpu_offload", "parallel.offload", {True: True, False: None}, joint=True),
        Mapped("zero_optimization.cpu_offload_param", "parallel.offload", {True: True, False: None}, joint=True),
        Missing("optimizer state alone goes to disk", below("zero_optimization.offload_param", "nvme_path")),
        Missing("everything is offloaded, or nothing", "zero_optimization.offload_optimizer.ratio",
                off=(1, 1.0, None)),
        Meaningless("FSDP2 manages the copies to the host", below("zero_optimization.offload_optimizer", (
            "buffer_count buffer_size pin_memory pipeline pipeline_read pipeline_write fast_init super_offload "
            "cpuadam_cores_perc")) + " " + below("zero_optimization.offload_param", (
                "buffer_count buffer_size max_in_cpu pin_memory")) +
            " zero_optimization.cpu_offload_use_pin_memory"),
        Missing("set parallel.replicate for copies within part of the cluster",
                below("zero_optimization", "zero_hpz_partition_size mics_shard_size"), off=(1, -1, 0, None)),
        Meaningless("HSDP's copies reduce inside and between nodes by themselves",
                    "zero_optimization.mics_hierarchical_params_gather"),
        Missing("FSDP2 sends weights and gradients in bf16 or fp32; compression.kind quantised is for ddp and zero1",
                below("zero_optimization", (
                    "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"))),
        Missing("updates are not delayed on the host; parallel.overlap_update begins them during the backward pass",
                "zero_optimization.zenflow.*"),
        Meaningless(_BUCKETS, below("zero_optimization", (
            "allgather_partitions allgather_bucket_size reduce_scatter reduce_bucket_size contiguous_gradients "
            "overlap_comm round_robin_gradients use_multi_rank_bucket_allreduce sub_group_size prefetch_bucket_size "
            "param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
            "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential parameter_alignment "
            "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
            "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_module_granularity_threshold "
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential memory_efficient_linear grad_hooks "
            "compute_grad_norm legacy_stage1 log_trace_cache_warnings enable_sanity_checks override_module_apply "
            "leaf_module.classes leaf_module.names leaf_module.name_suffixes save_muon_momentum_buffer_in_memory")) +
            " zero_optimization.ignore_unused_parameters"),
        Meaningless("checkpoints are sharded, hold the fp32 weights, and load under any layout",
                    below("zero_optimization", (
                        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"))),
        Meaningless(_WHOLE, below("zero_optimization", (
            "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save"))),
        Missing("gradients are means over the tokens of the global batch", "gradient_allreduce_op", off=("mean", None)),
        Meaningless("gradients are means over the tokens of the global batch, added up in fp32",
                    "prescale_gradients gradient_predivide_factor disable_allgather fp32_allreduce"),
        Missing("gradients of the embedding are dense", "sparse_gradients"),
        # other layouts
        Mapped("tensor_parallel.autotp_size", "parallel.tensor", lambda given: given or None),
        Mapped("sequence_parallel_size", "parallel.context", note="Ulysses: with parallel.context_method all_to_all"),
        Mapped("tensor_parallel.tp_overlap_comm", "parallel.async_tensor", {True: True, False: None}),
        Meaningless("a model family says how its layers are cut", below("tensor_parallel", (
            "preset_model dtype keep_module_on_host replace_with_kernel_inject injection_policy_tuple "
            "vocab_parallel_lm_head vocab_parallel_ce_backend partition_config.* tensor_parallel.*"))),
        Mapped("expert_parallel.autoep_size", "parallel.expert"),
        Meaningless("a model family says what its experts are", "expert_parallel.*"),
        Mapped("pipeline.stages", "parallel.pipeline", lambda given: given if isinstance(given, int) else None),
        Meaningless("stages are balanced by cost; memory.activation_checkpointing recomputes", below("pipeline", (
            "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned"))),
        Missing("pipeline stages do not mix sequence lengths here", "use_data_before_expert_parallelism"),
        # memory
        Mapped("activation_checkpointing.cpu_checkpointing", "memory.activation_checkpointing",
               {True: "offload", False: None}, joint=True),
        Missing("context or tensor parallelism shares activations: parallel.context",
                "activation_checkpointing.partition_activations"),
        Meaningless("memory.activation_checkpointing says which blocks recompute", below("activation_checkpointing", (
            "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile"))),
        Meaningless("memory.optimizer_disk reads and writes directly, several blocks at a time", "aio.*"),
        Mapped("compile.deepcompile", "compile", {True: True, False: None}),
        Meaningless("torch.compile has no passes of DeepSpeed's", "compile.*"),
        # logs and metrics
        Mapped("steps_per_print", "metrics.every_steps", lambda given: min(int(given), 1000) or None),
        Mapped("log_level", "logs.level", {"debug": "debug", "info": "info", "warning": "warning", "error": "error"}),
        Mapped("tensorboard.enabled", "metrics.trackers", {True: "tensorboard", False: None}, joint=True),
        Mapped("wandb.enabled", "metrics.trackers", {True: "wandb", False: None}, joint=True),
        Mapped("wandb.project", "metrics.trackers", joint=True, note="project of the tracker"),
        Mapped("wandb.team", "metrics.trackers", joint=True, note="entity of the tracker"),
        Meaningless("the run's name and folder are run.id and run.uri", (
            "tensorboard.output_path tensorboard.job_name wandb.group csv_monitor.output_path csv_monitor.job_name")),
        Meaningless("metrics.jsonl is always written", "csv_monitor.enabled"),
        Missing("trackers are tensorboard, prometheus and wandb; tw.Tracker is open for your own", "comet.enabled"),
        Meaningless("there is no Comet tracker", "comet.*"),
        Meaningless(_MEASURED, "wall_clock_breakdown memory_breakdown flops_profiler.* comms_logger.* timers.*"),
        Meaningless("tidewheel plan ranks layouts before the run", "autotuning.*"),
        Meaningless("run.json has the whole configuration", "dump_state"),
        # data and checkpoints
        Mapped("elasticity.max_train_batch_size", "batch.global_sequences", joint=True,
               note="the batch never changes; workers may"),
        Mapped("elasticity.min_gpus", "elastic.min_workers"),
        Mapped("elasticity.max_gpus", "elastic.max_workers"),
        Meaningless("every run is elastic; any number of workers that divides batch.virtual_ranks gives the same "
                    "result", below("elasticity", (
                        "enabled micro_batch_sizes min_time prefer_large_batch prefer_larger_batch version "
                        "ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size"))),
        Meaningless("checkpoints are sharded, verified, and load under any layout", below("checkpoint", (
            "tag_validation load_universal use_node_local_storage checkpoint_serialization parallel_write.* "
            "writer.*")) +
            " datastates_ckpt.* nebula.*"),
        Missing("curriculum and token dropping are not built in; data.mixture has phases",
                "data_efficiency.enabled curriculum_learning.enabled"),
        Meaningless("see its enabled", "data_efficiency.* curriculum_learning.*"),
        Missing("attention is dense within documents; model families may have windows", "sparse_attention.*"),
        Missing(_COMPRESSION, "compression_training.* quantize_training.* weight_quantization.*"),
        Missing("layers are not dropped", "progressive_layer_drop.enabled eigenvalue.enabled"),
        Meaningless("see its enabled", "progressive_layer_drop.* eigenvalue.*"),
        Meaningless("tidewheel generate and rollouts generate", "hybrid_engine.*"),
        Meaningless("shards say their vocabulary", "vocabulary_size"),
        Meaningless("every batch is whole: batch.global_sequences", "dataloader_drop_last"),
        Meaningless("workers collect garbage as Python does", "disable_python_gc"),
        Mapped("seed", "seed data.seed"),
        Meaningless("the launcher is Ray", "data_parallel_group global_rank"),
    ),
)
