"""Compare the predictions of `tidewheel plan` with published speeds, to which nothing is fitted.

    python -m tests.benchmarks.plan_published

The plan is a roofline of Tidewheel's work without launches, power limits, stragglers and host work, so a published run
should reach most of it. At 131,072 tokens attention is most of the work, and Llama 3's kernel is faster than
FlashAttention-2, which the plan assumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidewheel.config import build
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.step_time import step_time
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Run:
    """One published measurement."""

    source: str
    gpu: str
    gpus: int
    model: dict[str, Any]
    length: int
    micro_sequences: int
    micro_batches: int
    parallel: dict[str, Any]
    kept: str
    """The setting of memory.activation_checkpointing that is nearest to the published run's."""
    precision: str
    published: float
    """Tokens/s per GPU. For Llama 3 it is computed from TFLOP/s per GPU, with 6 FLOPs per parameter and attention."""


_405B = {"dim": 16384, "num_layers": 126, "num_heads": 128, "num_kv_heads": 8, "ffn_dim": 53248, "qk_norm": False,
         "max_sequence_length": 131072}
_OLMO_7B = {"dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 11008}
_LLAMA3 = "Llama 3 405B, arXiv:2407.21783, table 4"
_SHARDED = {"data": "zero3", "reduce": "micro_batch"}


def llama3(gpus: int, length: int, context: int, data: int, sequences: int, tflops: float) -> Run:
    """Return a 405B run with TP 8 and PP 16; `sequences` is the number per data-parallel rank and step."""
    parallel = {"data": "zero2", "tensor": 8, "pipeline": 16, "context": context,
                "pipeline_schedule": "interleaved_1f1b", "pipeline_stages": 7}
    model = build(TrainConfig, {"model": _405B}).model
    flops = model.flops_per_token(128_256, length // 2)  # half for causal attention, as published
    assert gpus == 8 * 16 * context * data
    return Run(_LLAMA3, "h100", gpus, _405B, length, 1, sequences, parallel, "none", "bf16", tflops * 1e12 / flops)


RUNS = (
    Run("torchtitan 2024-12, 8B, H100 at 500 W", "h100", 8, {"preset": "8b"}, 8192, 1, 1, _SHARDED, "selective",
        "bf16", 6_667),
    Run("the same in fp8", "h100", 8, {"preset": "8b"}, 8192, 1, 1, _SHARDED, "selective", "fp8", 8_532),
    Run("torchtitan 2025-06, 8B, 32 H200, fp8", "h200", 32, {"preset": "8b"}, 8192, 2, 1, _SHARDED, "selective", "fp8",
        10_938),
    Run("OLMo-core, 7B", "h100", 8, _OLMO_7B, 4096, 2, 8, _SHARDED, "selective", "bf16", 9_850),
    Run("OLMo-core, 1B", "h100", 8, {"preset": "1b"}, 4096, 8, 2, _SHARDED, "none", "bf16", 45_500),
    llama3(8_192, 8_192, 1, 64, 32, 430), llama3(16_384, 8_192, 1, 128, 16, 400), llama3(16_384, 131_072, 16, 8, 16,
                                                                                        380))


def predicted(run: Run) -> tuple[float, float]:
    """Return the plan's tokens/s per GPU and its MFU."""
    data = run.gpus // (run.parallel.get("tensor", 1) * run.parallel.get("pipeline", 1)
                        * run.parallel.get("context", 1))
    sequences = data * run.micro_sequences * run.micro_batches
    config = build(TrainConfig, {
        "model": run.model, "precision": run.precision, "compile": True,
        "batch": {"global_sequences": sequences, "micro_sequences": run.micro_sequences, "virtual_ranks": data},
        "parameters": "bf16" if run.model is _405B else "fp32"})
    layout = Layout(ParallelConfig(**run.parallel), MemoryConfig.model_validate(
        {"activation_checkpointing": run.kept}), run.micro_sequences, data, run.micro_batches)
    vocabulary = 100_352 if run.model is _OLMO_7B else 128_256
    time = step_time(Job(config, vocabulary, run.length), layout, ClusterConfig.model_validate(
        {"gpus": run.gpus, "gpu": run.gpu}))
    return time.tokens_per_second / run.gpus, time.mfu


def main() -> None:
    print("| run | GPUs | length | tokens/s and GPU, published | the plan | published / plan |")
    print("|---|---|---|---|---|---|")
    for run in RUNS:
        speed, _ = predicted(run)
        print(f"| {run.source} | {run.gpus:,} {run.gpu} | {run.length:,} | {run.published:,.0f} | {speed:,.0f} | "
              f"{run.published / speed:.0%} |")


if __name__ == "__main__":
    main()
