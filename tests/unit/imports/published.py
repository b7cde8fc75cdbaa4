"""Settings of other tools as they document and publish them: names and values, typed for the tests.

DeepSpeed: https://www.deepspeed.ai/docs/config-json/ and the pydantic models of release 0.19.
"""

from __future__ import annotations

import json


def _below(group: str, names: str) -> list[str]:
    return [f"{group}.{name}" for name in names.split()]


def _names(names: str) -> list[str]:
    return names.split()


DEEPSPEED_KEYS = [
    *_names("""train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor sparse_gradients
    gradient_clipping steps_per_print wall_clock_breakdown dump_state seq_parallel_communication_data_type
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer memory_breakdown disable_allgather dataloader_drop_last
    use_data_before_expert_parallelism disable_python_gc log_level vocabulary_size check_overflow"""),
    *_below("optimizer", "type legacy_fusion"),
    *_below("optimizer.params", """lr betas eps weight_decay momentum muon_lr adam_lr ns_method torch_adam adam_w_mode
    freeze_step cuda_aware comm_backend_name bias_correction var_freeze_step var_update_scaler local_step_scaler
    local_step_clipper max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold"""),
    "scheduler.type",
    *_below("scheduler.params", """warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps
    warmup_min_ratio cos_min_ratio lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate
    lr_range_test_staircase cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size
    cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_min_mom cycle_max_mom decay_mom_rate
    last_batch_iteration"""),
    *_below("fp16", """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
    consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads"""),
    *_below("bf16", """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
    bf16_optimizer_states"""),
    *_below("amp", "enabled opt_level"),
    *_below("torch_autocast", "enabled dtype lower_precision_safe_modules"),
    *_below("data_types", "grad_accum_dtype param_dtype buffer_dtype"),
    *_below("zero_optimization", """stage contiguous_gradients reduce_scatter reduce_bucket_size
    use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm
    load_from_fp32_weights elastic_checkpoint sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
    allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment grad_hooks
    zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    mics_shard_size mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
    override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_gather_fp16_weights_on_model_save"""),
    *_below("zero_optimization.offload_param", "device nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
    *_below("zero_optimization.offload_optimizer", """device nvme_path buffer_count pin_memory pipeline_read
    pipeline_write fast_init ratio super_offload cpuadam_cores_perc"""),
    *_below("zero_optimization.zenflow", """topk_ratio select_strategy select_interval update_interval overlap_step
    offload auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"""),
    *_below("zero_optimization.leaf_module", "classes names name_suffixes"),
    *_below("aio", "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds"),
    *_below("tensor_parallel", """autotp_size preset_model tp_overlap_comm keep_module_on_host dtype
    vocab_parallel_lm_head vocab_parallel_ce_backend partition_config.use_default_specs
    partition_config.layer_specs"""),
    *_below("expert_parallel", "enabled autoep_size expert_tensor_parallel_size preset_model top_k score_func"),
    *_below("hybrid_engine", "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters"),
    *_below("compile", "deepcompile passes offload_activation offload_parameters double_buffer debug_log"),
    *_below("activation_checkpointing", """partition_activations cpu_checkpointing contiguous_memory_optimization
    number_checkpoints synchronize_checkpoint_boundary profile"""),
    *_below("autotuning", """enabled fast results_dir exps_dir overwrite metric start_profile_step end_profile_step
    max_train_batch_size mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials"""),
    *_below("flops_profiler", "enabled profile_step module_depth top_modules detailed output_file"),
    *_below("sparse_attention", "mode block num_local_blocks"),
    *_below("data_efficiency", "enabled seed data_routing.enabled data_sampling.curriculum_learning.enabled"),
    *_below("curriculum_learning", """enabled curriculum_type min_difficulty max_difficulty schedule_type
    schedule_config.total_curriculum_step"""),
    *_below("tensorboard", "enabled output_path job_name"), *_below("wandb", "enabled group team project"),
    *_below("csv_monitor", "enabled output_path job_name"),
    *_below("comet", "enabled project workspace api_key experiment_name online mode"),
    *_below("elasticity", """enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time
    prefer_large_batch version ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size"""),
    *_below("comms_logger", "enabled verbose prof_all debug prof_ops"),
    *_below("compression_training", "layer_reduction.enabled weight_quantization.shared_parameters.enabled"),
    *_below("checkpoint", "tag_validation load_universal use_node_local_storage parallel_write.pipeline_stage"),
]

#: https://huggingface.co/docs/transformers/deepspeed, the example of ZeRO-3 with offload
ZERO3_AUTO = json.dumps({
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False})

#: https://github.com/deepspeedai/DeepSpeedExamples, training/pipeline_parallelism/ds_config.json
PIPELINE = json.dumps({
    "train_batch_size": 256, "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
    "steps_per_print": 10, "wall_clock_breakdown": False})

#: https://github.com/deepspeedai/DeepSpeedExamples, training/bing_bert/1-bit_adam/nccl
ONE_BIT_ADAM = json.dumps({
    "train_batch_size": 4096, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 1000,
    "prescale_gradients": False,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000, "weight_decay": 0.01,
                                                   "bias_correction": False}},
    "gradient_clipping": 1.0, "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}})

#: https://github.com/huggingface/accelerate, examples/torch_native_parallelism/configs/tp_hsdp.yaml
ACCELERATE_HSDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
tpu_env: []
use_cpu: false
"""

#: https://github.com/pytorch/torchtitan, llama3_8b.toml of release 0.2
TORCHTITAN_8B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
[metrics]
log_freq = 10
enable_tensorboard = true
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable = false
interval = 500
async_mode = "disabled"
[compile]
enable = false
components = ["model", "loss"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
"""

#: https://github.com/NVIDIA/Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh without fp8
MEGATRON_8B = r"""
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --use-mcore-models --num-layers 32 --hidden-size 4096 \
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 \
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 \
    --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 \
    --normalization RMSNorm --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights \
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 \
    --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine \
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 \
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 \
    --tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather --log-interval 1 --eval-iters 32 --eval-interval 100 \
    --save-interval 1000 --log-throughput --ckpt-format torch_dist --tensorboard-dir logs
"""
