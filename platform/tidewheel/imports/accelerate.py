"""Hugging Face Accelerate: the keys of its YAML configuration."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.table import Mapped, Meaningless, Missing, Source, Table, below

_PLAIN = {True: True, False: None}
_SHARDING = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "zero3",
             "HYBRID_SHARD_ZERO2": "zero2", "1": "zero3", "2": "zero2", "3": "ddp", "4": "zero3", "5": "zero2"}
_OFFLOAD = {"cpu": True, "none": None}
_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_BLOCKS = "each block is a unit of FSDP2, gathered ahead, and saved in shards"
_LAUNCH = "the launcher is Ray: it finds nodes and GPUs"
_BATCH = "the batch is the script's: set batch.global_sequences and batch.micro_sequences"


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


TABLE = Table(
    "accelerate", "Hugging Face Accelerate", "the YAML that `accelerate config` writes (1.x)",
    formats=("yaml", "json"), joint=_joint,
    notes=("The file says how a script is launched; batch, model, optimizer and steps are in the script: give them "
           "with `--set`. The batch is one sequence for each process until then.",),
    entries=(
        Mapped("distributed_type", "parallel.data", joint=True,
               note="FSDP and DEEPSPEED: see their groups; MULTI_GPU: ddp"),
        Mapped("mixed_precision", "precision", {"no": None, "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}, joint=True),
        Mapped("num_processes", "elastic.max_workers batch.virtual_ranks", joint=True),
        Mapped("use_cpu", "elastic.gpus_per_worker", {True: 0, False: None}, joint=True),
        Mapped("debug", "logs.level", {True: "debug", False: None}),
        Meaningless(_LAUNCH, (
            "compute_environment machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend "
            "same_network main_training_function enable_cpu_affinity mpirun_config.mpirun_hostfile "
            "mpirun_config.mpirun_ccl command_file commands num_cpu_threads_per_process max_restarts")),
        Missing("models run on CPU and GPU, not on TPU or in SageMaker", (
            "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env ec2_instance_type "
            "iam_role_name profile region image_uri py_version pytorch_version transformers_version "
            "sagemaker_inputs_file sagemaker_metrics_file base_job_name additional_args.* dynamo_config_sagemaker")),
        # FSDP
        Mapped("fsdp_config.fsdp_sharding_strategy", "parallel.data", dict(_SHARDING), joint=True),
        Mapped("fsdp_config.fsdp_reshard_after_forward", "parallel.data", _reshards, "true: zero3, false: zero2; or a "
               "sharding strategy", joint=True),
        Mapped("fsdp_config.fsdp_offload_params", "parallel.offload", dict(_PLAIN)),
        Mapped("fsdp_config.fsdp_activation_checkpointing", "memory.activation_checkpointing",
               {True: "full", False: None}),
        Mapped("fsdp_config.fsdp_activation_checkpointing_offload", "memory.activation_checkpointing",
               {True: "offload", False: None}),
        Meaningless(_BLOCKS, below("fsdp_config", (
            "fsdp_version fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
            "fsdp_backward_prefetch fsdp_forward_prefetch fsdp_use_orig_params fsdp_sync_module_states "
            "fsdp_cpu_ram_efficient_loading fsdp_state_dict_type fsdp_backward_prefetch_policy"))),
        Missing("every module of a model is sharded", "fsdp_config.fsdp_ignored_modules"),
        # DeepSpeed
        Mapped("deepspeed_config.zero_stage", "parallel.data", dict(_STAGES), joint=True),
        Mapped("deepspeed_config.gradient_clipping", "optimizer.clip_norm", float),
        Mapped("deepspeed_config.offload_optimizer_device", "parallel.offload", dict(_OFFLOAD)),
        Mapped("deepspeed_config.offload_param_device", "parallel.offload", dict(_OFFLOAD)),
        Missing("set memory.optimizer_disk for the optimizer; parameters are not offloaded to disk", below(
            "deepspeed_config", "offload_optimizer_nvme_path offload_param_nvme_path")),
        Missing(_BATCH, "deepspeed_config.gradient_accumulation_steps", off=(1, None)),
        Missing("import that file too: tidewheel import-config deepspeed", "deepspeed_config.deepspeed_config_file"),
        Meaningless(_LAUNCH, below("deepspeed_config", (
            "deepspeed_hostfile deepspeed_multinode_launcher deepspeed_inclusion_filter deepspeed_exclusion_filter "
            "deepspeed_moe_layer_cls_names zero3_init_flag zero3_save_16bit_model"))),
        # layouts
        Mapped("parallelism_config.parallelism_config_tp_size", "parallel.tensor"),
        Mapped("parallelism_config.parallelism_config_cp_size", "parallel.context"),
        Mapped("parallelism_config.parallelism_config_dp_replicate_size", "parallel.replicate"),
        Mapped("parallelism_config.parallelism_config_cp_comm_strategy", "parallel.context_method",
               {"allgather": "all_gather", "alltoall": "ring"}, "alltoall passes keys around, as ring does here"),
        Meaningless("the rest of the workers is data parallel",
                    "parallelism_config.parallelism_config_dp_shard_size"),
        Missing("Ulysses is parallel.context with parallel.context_method all_to_all",
                "parallelism_config.parallelism_config_sp_size", off=(1, None)),
        Meaningless("see parallel.context_method", below("parallelism_config", (
            "parallelism_config_cp_backend parallelism_config_sp_backend parallelism_config_sp_seq_length "
            "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation"))),
        # Megatron-LM
        Mapped("megatron_lm_config.megatron_lm_tp_degree", "parallel.tensor"),
        Mapped("megatron_lm_config.megatron_lm_pp_degree", "parallel.pipeline"),
        Mapped("megatron_lm_config.megatron_lm_context_parallel_size", "parallel.context"),
        Mapped("megatron_lm_config.megatron_lm_expert_model_parallel_size", "parallel.expert"),
        Mapped("megatron_lm_config.megatron_lm_gradient_clipping", "optimizer.clip_norm", float),
        Mapped("megatron_lm_config.megatron_lm_recompute_activations", "memory.activation_checkpointing",
               {True: "selective", False: None}),
        Mapped("megatron_lm_config.megatron_lm_optimizer_cpu_offload", "parallel.offload", dict(_PLAIN)),
        Mapped("megatron_lm_config.megatron_lm_use_distributed_optimizer", "parallel.data",
               {True: "zero1", False: None}, joint=True),
        Missing(_BATCH, "megatron_lm_config.megatron_lm_num_micro_batches", off=(1, None)),
        Meaningless("sequence parallelism belongs to tensor parallelism; other settings are the model family's",
                    "megatron_lm_config.*"),
        # precision and compilation
        Mapped("fp8_config.enable_fsdp_float8_all_gather", "fp8.all_gather", dict(_PLAIN)),
        Meaningless("fp8.recipe and fp8.layers say how, and scales follow from the values", below("fp8_config", (
            "backend amax_compute_algo amax_compute_algorithm amax_history_len amax_history_length fp8_format interval "
            "margin override_linear_precision use_autocast_during_eval opt_level optimization_level pad_inner_dim"))),
        Mapped("dynamo_config.dynamo_backend", "compile", {"INDUCTOR": True, "NO": None}),
        Meaningless("blocks are compiled one by one", below("dynamo_config", (
            "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation"))),
        Missing("IPEX is torch's own today", "ipex_config.*"),
    ),
)
