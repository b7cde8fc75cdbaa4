"""Names of Megatron-LM's arguments that have no counterpart here, by the reason."""

from __future__ import annotations


def _prefixed(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}-{name}" for name in names.split())


FUSIONS = """
no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
no-persist-layer-norm no-gradient-accumulation-fusion no-gradient-reduce-div-fusion cross-entropy-loss-fusion
cross-entropy-fusion-impl moe-permute-fusion mla-down-proj-fusion moe-grouped-gemm moe-use-legacy-grouped-gemm
transformer-impl use-mcore-models use-legacy-models onnx-safe enable-cuda-graph cuda-graph-warmup-steps
external-cuda-graph
cuda-graph-scope cuda-graph-modules te-rng-tracker inference-rng-tracker disable-mamba-mem-eff-path use-sharp
disable-bf16-reduced-precision-matmul te-precision-config-file kitchen-config-file kitchen-recipe-number
defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute no-clone-scatter-output-in-embedding
use-flash-attn attention-backend rope-type optimizer-cuda-graph fp8-param-gather fp4-param-gather
no-create-attention-mask-in-dataloader attention-softmax-in-fp32 fp32-residual-connection apply-query-key-layer-scaling
output-logit-dtype symmetric-ar-type enable-experimental
"""
COMMUNICATION = """
overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step no-align-grad-reduce
no-align-param-gather
no-scatter-gather-tensors-in-pipeline no-overlap-p2p-communication overlap-p2p-communication-warmup-flush
microbatch-group-size-per-virtual-pipeline-stage ddp-num-buckets ddp-bucket-size ddp-pad-buckets-for-high-nccl-busbw
ddp-average-in-collective ddp-reduce-scatter-with-fp32-accumulation ddp-param-name-patterns-for-fp32-local-accumulation
gtp-remat-reduce-scatter-with-fp32-accumulation gtp-remat-nccl-ub gtp-expert-remat-nccl-ub use-nccl-ub
disable-symmetric-registration suggested-communication-unit-size create-all-gather-group nccl-communicator-config-path
no-use-layer-wise-param-layout num-distributed-optimizer-instances use-custom-fsdp megatron-fsdp-version
fsdp-manual-registration fsdp-double-buffer fsdp-db-use-persist-buf-on-alloc-fail keep-fp8-transpose-cache
keep-fp8-transpose-cache-when-using-custom-fsdp megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype
megatron-fsdp-grad-comm-dtype megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
enable-full-sharding-in-hsdp outer-dp-sharding-strategy use-tp-pp-dp-mapping use-ring-exchange-p2p
disable-gloo-process-groups pipeline-model-parallel-comm-backend high-priority-stream-groups
tp-comm-overlap-cfg disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad tp-comm-bootstrap-backend disable-tp-comm-split-ag
disable-tp-comm-split-rs no-async-tensor-model-parallel-allreduce moe-token-dispatcher-type moe-enable-deepep
moe-deepep-num-sms moe-shared-expert-overlap distribute-saved-activations distributed-backend local-rank lazy-mpu-init
hierarchical-context-parallel-sizes accumulate-allreduce-grads-in-fp32 reuse-grad-buf-for-mxfp8-param-ag
fake-process-group moe-extended-tp mlp-chunks-for-prefill nccl-all-reduce-for-prefill flash-decode
"""
STARTS = """
no-initialization use-cpu-initialization init-model-with-meta-device data-parallel-random-init skip-train test-mode
spec yaml-cfg config-logger-dir use-checkpoint-args use-mp-args-from-checkpoint-args
no-use-tokenizer-model-from-checkpoint-args use-checkpoint-opt_param-scheduler override-opt_param-scheduler
override-ckpt-iteration dump-param-to-param-group-map manual-gc manual-gc-interval no-manual-gc-eval
empty-unused-memory-level exit-signal-handler exit-interval exit-duration-in-mins adlr-autoresume
adlr-autoresume-interval rerun-mode error-injection-rate error-injection-type result-rejected-tracker-filename
enable-msc disable-msc run-workload-inspector-server enable-ft-package calc-ft-timeouts ft-num-warmup-iters
""" + _prefixed("inprocess", """
restart max-iterations monitor-thread-interval monitor-process-interval progress-watchdog-interval heartbeat-interval
soft-timeout hard-timeout heartbeat-timeout barrier-timeout completion-timeout last-call-wait termination-grace-time
granularity active-world-size empty-cuda-cache""")
CHECKPOINTS = """
async-save use-persistent-ckpt-worker auto-detect-ckpt-format ckpt-format dist-ckpt-format use-dist-ckpt
dist-ckpt-workers dist-ckpt-strictness ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure ckpt-step
ckpt-drop-redundant-extra-state exit-on-missing-checkpoint persistent-save-interval non-persistent-save-interval
non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo
replication replication-jump replication-factor no-save-optim no-save-rng no-load-optim no-load-rng
load-model-opt-format finetune
"""
LOGS = """
log-params-norm log-num-zeros-in-grad log-throughput log-progress log-energy log-straggler timing-log-level
timing-log-option tensorboard-queue-size log-timers-to-tensorboard no-log-loss-scale-to-tensorboard
log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard tensorboard-log-interval
no-barrier-with-level-1-timing moe-per-layer-logging disable-straggler-on-startup straggler-ctrlr-port
straggler-minmax-count no-one-logger one-logger-project one-logger-run-name one-logger-async app-tag-run-name
app-tag-run-version wandb-save-dir record-memory-history memory-snapshot-path profile use-pytorch-profiler
profile-step-start profile-step-end profile-ranks otel-enabled otel-service-name otel-span-groups
check-weight-hash-across-dp-replicas-interval
"""
DATA = """
data-path split train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path
per-dataset-sequences-path phase-transition-iterations data-cache-path no-mmap-bin-files mock-data encoder-seq-length
decoder-seq-length retriever-seq-length sample-rate mask-prob short-seq-prob num-workers reset-position-ids
reset-attention-mask eod-mask-loss num-dataset-builder-threads object-storage-cache-path mid-level-dataset-surplus
allow-ambiguous-pad-tokens dataloader-type dataloader-fast-cache-load dataloader-defer-npy-index-mmap
dataloader-inter-document-masking vocab-file merge-file vocab-extra-ids tokenizer-type tokenizer-model tiktoken-pattern
tiktoken-num-special-tokens tiktoken-special-tokens make-vocab-size-divisible-by train-sync-interval eval-iters
""" + _prefixed("fim", """
data rate spm-rate split-sample fragment-rate no-prefix prefix-token middle-token suffix-token pad-token eod-token""")
OTHER_MODELS = """
bert-embedder-type bert-load bert-no-binary-head output-bert-embeddings biencoder-projection-dim
biencoder-shared-query-context-model block-data-path embedding-path evidence-data-path ict-head-size ict-load
indexer-batch-size indexer-log-interval query-in-block-prob retriever-report-topk-accuracies retriever-score-scaling
titles-data-path use-one-sent-docs classes-fraction data-per-class-fraction no-data-sharding head-lr-mult img-h img-w
iter-per-epoch mask-factor mask-type num-channels num-classes patch-dim swin-backbone-type vision-backbone-type
vision-pretraining vision-pretraining-type encoder-num-layers decoder-num-layers encoder-pipeline-model-parallel-size
encoder-tensor-model-parallel-size relative-attention-num-buckets relative-attention-max-distance hybrid-attention-ratio
hybrid-layer-pattern hybrid-mlp-ratio hybrid-override-pattern is-hybrid-model linear-attention-freq
heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json mrope-section moe-use-upcycling
moe-upcycling-granularity mtp-num-layers mtp-loss-scaling-factor moe-layer-freq
""" + _prefixed("dino", """
bottleneck-size freeze-last-layer head-hidden-size local-crops-number local-img-size norm-last-layer teacher-temp
warmup-teacher-temp warmup-teacher-temp-epochs""") + " " + _prefixed("mamba", """
head-dim num-groups num-heads state-dim inference-conv-states-dtype inference-ssm-states-dtype
training-ssm-states-dtype""") + " " + _prefixed("retro", """
add-retriever attention-gate cyclic-train-iters encoder-attention-dropout encoder-hidden-dropout encoder-layers
no-verify-neighbor-count num-neighbors num-retrieved-chunks project-dir""")
POST_TRAINING = """
sft sft-tokenizer-prompt-format perform-rl-step langrl-env-config refit-method
""" + _prefixed("grpo", """
clamp-eps-lower clamp-eps-upper entropy-term-weight filter-groups-with-same-reward group-size iterations kl-beta
prompts-per-step""") + " " + _prefixed("rl", """
consumption-granularity default-temperature default-top-k default-top-p durable-rollout-bank generation-lag
importance-sampling-truncation-coef inference-expert-model-parallel-size inference-expert-tensor-model-parallel-size
inference-logprobs-is-correction inference-model-unified-memory-level inference-parsers
inference-pipeline-model-parallel-size inference-tensor-model-parallel-size kv-cache-management-mode
max-inflight-requests offload-inference-model-weights-when-idle offload-optimizer-during-inference partial-rollouts
persist-cuda-graphs profile profile-dir prompts-per-eval rollout-bank-dir rollout-bank-max-bytes sequence-packing-algo
sequence-packing-max-sequences-per-bin skip-bos-token submission-granularity training-cuda-graphs use-sequence-packing
verify-model-weights-swap""") + " " + _prefixed("logits", """
load-decode-threads load-dir load-ignore-errors load-kd-loss-alpha load-msc-prefetch-depth load-prefetch-factor
save-dir save-dtype save-top-k save-top-p save-top-p-min-k""")
INFERENCE = """
max-tokens-to-oom use-legacy-static-engine decode-only-cuda-graphs enable-chunked-prefill num-speculative-tokens
use-same-sampling-seed-across-dp-ranks cache-mla-latents
""" + _prefixed("inference", """
batch-times-seqlen-threshold max-requests max-seq-length dynamic-batching cuda-graph-all-prefills cuda-graph-max-tokens
coordinator-port disable-ep-consensus logging-step-interval shards text-gen-server-logging
use-synchronous-zmq-collectives wandb-logging""") + " " + _prefixed("inference-dynamic-batching", """
async-sched-mode block-size buffer-guaranteed-fraction buffer-overflow-factor buffer-size-gb chunk-size
cuda-graph-mixed-prefill-count cuda-graph-sizing-distribution logprobs-mode mamba-memory-ratio max-requests
max-requests-override max-tokens max-tokens-override num-cuda-graphs paused-buffer-size-gb prefix-caching
prefix-caching-coordinator-policy prefix-caching-eviction-policy prefix-caching-mamba-gb prefix-caching-routing-alpha
sampling-backend track-generated-token-events track-paused-request-events unified-memory-level""")
