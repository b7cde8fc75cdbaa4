"""Compare the predictions of `tidewheel plan` with published speeds, and with Tidewheel's own on a GPU.

Nothing is fitted to either.

    python -m tests.benchmarks.plan_published

The plan is a roofline of Tidewheel's work without launches, power limits, stragglers and host work, so a published run
should reach most of it. At 131,072 tokens attention is most of the work, and Llama 3's kernel is faster than
FlashAttention-2, which the plan assumes.

Mixtures of experts are planned with the techniques that the published run used and Tidewheel does not have: rows that
are sent to a node once, in fp8, beside the passes of another micro-batch. Where a run shares its experts over
tensor-parallel ranks, which Tidewheel does not do, the row has as many context-parallel ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.ours import configuration
from tests.benchmarks.gpu.rows import ROWS
from tidewheel.config import build
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.memory import memory
from tidewheel.plan.routed_rows import OWN, ExpertTechniques
from tidewheel.plan.step_time import step_time
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig

OWN_RUN = Path(__file__).parent / "gpu/results/2026-11-26-h100.jsonl"


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
    vocabulary: int = 128_256
    why: str = ""
    """Why the plan is off, where it is off by more than a quarter; or what is assumed."""
    techniques: ExpertTechniques = OWN
    """Of a mixture of experts."""


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
    Run("OLMo-core, 7B", "h100", 8, _OLMO_7B, 4096, 2, 8, _SHARDED, "selective", "bf16", 9_850, 100_352),
    Run("OLMo-core, 1B", "h100", 8, {"preset": "1b"}, 4096, 8, 2, _SHARDED, "none", "bf16", 45_500),
    llama3(8_192, 8_192, 1, 64, 32, 430), llama3(16_384, 8_192, 1, 128, 16, 400), llama3(16_384, 131_072, 16, 8, 16,
                                                                                        380))

_352B = {"kind": "mixtral", "dim": 4096, "num_layers": 60, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336,
         "num_experts": 32, "experts_per_token": 3}
_QWEN_30B = {"kind": "qwen3_moe", "preset": "qwen3_30b_a3b"}
_MEGASCALE = {"data": "zero2", "pipeline": 15, "context": 8, "expert": 8}
_BRIDGE = "Megatron Bridge 25.11"
_ZOO = "Megatron-MoE-ModelZoo"
_INTERLEAVED = {"data": "zero2", "pipeline_schedule": "interleaved_1f1b"}
_FP8 = ExpertTechniques(fp8_experts=True)
_DEEP_EP = ExpertTechniques(once_per_node=True)
_OVERLAPPED = ExpertTechniques(once_per_node=True, overlapped=True)
_DUAL_PIPE = ExpertTechniques(once_per_node=True, fp8_rows=True, overlapped=True, fp8_experts=True)
_HOST = "waits for the host, which reads the number of rows of every layer; see the next row"
_ROOFLINE = "no more than a roofline, as for dense runs"


def megascale(gpus: int, thousands: float) -> Run:
    """Return a run of MegaScale-MoE's 352B: PP 15, and 8 ranks of a node that share sequences and experts."""
    return Run("MegaScale-MoE 352B, arXiv:2505.11432, tables 2 and 3", "h800", gpus, _352B, 8192, 1,
               720 // (gpus // 120), _MEGASCALE, "selective", "bf16", 1000 * thousands / gpus, 65_536, _ROOFLINE)


MIXTURES = (
    # 468 TFLOP/s per GPU over 6 x 12.9 B + attention, halved for causality: 79.6 GFLOPs per token
    Run("Mixtral 8x7B, Megatron Core 0.9", "h100", 64, {"kind": "mixtral", "preset": "mixtral_8x7b"}, 4096, 1, 16,
        {**_INTERLEAVED, "pipeline": 4, "pipeline_stages": 8, "expert": 8}, "none", "bf16", 468e12 / 79.6e9, 32_000,
        "PP 4 and EP 8 are published, the rest is assumed"),
    megascale(240, 272.9), megascale(480, 498.6), megascale(720, 740.1), megascale(1440, 1407.7),
    Run(f"Qwen 3 235B-A22B, {_ZOO}, EP 32", "h100", 256, {"kind": "qwen3_moe", "preset": "qwen3_235b_a22b"}, 4096, 1,
        128, {**_INTERLEAVED, "pipeline": 8, "pipeline_stages": 4, "context": 2, "expert": 32}, "selective", "bf16",
        2048 * 4096 / 19.7 / 256, 151_936, techniques=_DEEP_EP),
    Run(f"the same, 1F1B overlaps the all-to-all, {_ZOO}", "h100", 256,
        {"kind": "qwen3_moe", "preset": "qwen3_235b_a22b"}, 4096, 1, 128,
        {**_INTERLEAVED, "pipeline": 8, "pipeline_stages": 4, "context": 2, "expert": 32}, "selective", "bf16",
        2048 * 4096 / 17.6 / 256, 151_936, "the run hides 2.1 s of 19.7, the plan 5.9 of 18.1", _OVERLAPPED),
    Run(f"the same, FSDP and EP 8, {_ZOO}", "h100", 256, {"kind": "qwen3_moe", "preset": "qwen3_235b_a22b"}, 4096, 4,
        4, {**_SHARDED, "context": 2, "expert": 8}, "full", "bf16", 2048 * 4096 / 17.6 / 256, 151_936,
        "FSDP sends for 22 s at 82 % of the network's bandwidth; the run must reach more of it", _DEEP_EP),
    Run(f"Qwen 3 30B-A3B, {_BRIDGE}, fp8", "h100", 16, _QWEN_30B, 4096, 2, 32,
        {**_INTERLEAVED, "pipeline": 2, "pipeline_stages": 24, "expert": 8}, "selective", "fp8", 5_275, 151_936,
        _HOST, _FP8),
    Run("the same, 25.09, fixed number of rows for each expert", "h100", 16, _QWEN_30B, 4096, 2, 32,
        {**_INTERLEAVED, "pipeline": 2, "pipeline_stages": 24, "expert": 8}, "selective", "fp8", 10_494, 151_936,
        techniques=_FP8),
    Run(f"Qwen 3 30B-A3B, {_BRIDGE}, fp8", "b200", 8, _QWEN_30B, 4096, 1, 64,
        {"data": "zero2", "expert": 8, "reduce": "step"}, "selective", "fp8", 9_299, 151_936, _HOST,
        _FP8),
    Run("the same, 25.09, fixed number of rows for each expert", "b200", 8, _QWEN_30B, 4096, 1, 64,
        {"data": "zero2", "expert": 8, "reduce": "step"}, "selective", "fp8", 18_066, 151_936, _ROOFLINE, _FP8),
    Run("the same, 25.11, 8 GB200 (planned as B200), 4 sequences", "b200", 8, _QWEN_30B, 4096, 4, 16,
        {"data": "zero2", "expert": 8, "reduce": "step"}, "selective", "fp8", 23_766, 151_936, techniques=_FP8),
    # 2,664 k GPU hours for 14.8 T tokens (arXiv:2412.19437, table 1); of 2,788 k in all
    Run("DeepSeek-V3, arXiv:2412.19437, fp8", "h800", 2048, {"kind": "deepseek_v3", "preset": "deepseek_v3"}, 4096, 1,
        120, {**_INTERLEAVED, "pipeline": 16, "expert": 64}, "selective", "fp8", 14.8e12 / (2.664e6 * 3600), 129_280,
        _ROOFLINE, _DUAL_PIPE),
    Run(f"DeepSeek-V3, {_BRIDGE}, fp8", "b200", 256, {"kind": "deepseek_v3", "preset": "deepseek_v3"}, 4096, 1, 128,
        {"data": "zero2", "pipeline": 16, "expert": 8}, "selective", "fp8", 2_139, 129_280,
        _ROOFLINE, _FP8),
    Run("DeepSeek-V3, torchtitan 2026-03, bf16; layout assumed", "b200", 256,
        {"kind": "deepseek_v3", "preset": "deepseek_v3"}, 4096, 4, 4, {**_SHARDED, "expert": 32}, "full", "bf16", 859,
        129_280, "no pipeline; the layout is not published", _DEEP_EP))
"""Sources: docs.nvidia.com/nemo/megatron-bridge, performance summary; github.com/yanring/Megatron-MoE-ModelZoo,
best_practice; docs.nvidia.com/megatron-core, mixture of experts; pytorch.org/blog, 2026-03."""


def predicted(run: Run) -> tuple[float, float]:
    """Return the plan's tokens/s per GPU and its MFU."""
    layout = layout_of(run)
    data = layout.data
    sequences = data * run.micro_sequences * run.micro_batches
    config = build(TrainConfig, {
        "model": run.model, "precision": run.precision, "compile": True,
        "batch": {"global_sequences": sequences, "micro_sequences": run.micro_sequences, "virtual_ranks": data},
        "parameters": "bf16" if run.model is _405B or run in MIXTURES else "fp32"})
    time = step_time(Job(config, run.vocabulary, run.length, run.techniques), layout, ClusterConfig.model_validate(
        {"gpus": run.gpus, "gpu": run.gpu}))
    return time.tokens_per_second / run.gpus, time.mfu


def layout_of(run: Run) -> Layout:
    """Return the layout of a run."""
    parallel = ParallelConfig(**run.parallel)
    kept = MemoryConfig.model_validate({"activation_checkpointing": run.kept})
    return Layout(parallel, kept, run.micro_sequences, run.gpus // parallel.unit, run.micro_batches)


def mixtures_table() -> list[str]:
    """Return the lines of the table of mixtures of experts, in Markdown."""
    lines = ["| mixture of experts | GPUs | layout | tokens/s and GPU, published | the plan | published / plan | |",
             "|---|---|---|---|---|---|---|"]
    for run in MIXTURES:
        speed, _ = predicted(run)
        lines.append(f"| {run.source} | {run.gpus:,} {run.gpu} | {layout_of(run).describe()} | {run.published:,.0f} | "
                     f"{speed:,.0f} | {run.published / speed:.0%} | {run.why} |")
    return lines


@dataclass(frozen=True)
class Own:
    """A step of Tidewheel on one GPU."""

    row: str
    tokens: str
    measured: tuple[float, float]
    """Tokens/s and the peak of memory in GiB."""
    planned: tuple[float, float]


def own_steps() -> list[Own]:
    """Return Tidewheel's own steps on one H100. Packed documents leave out attention that the plan counts."""
    steps = []
    cases = {row.name: row.case for row in ROWS}
    for record in map(json.loads, OWN_RUN.read_text().splitlines()):
        if not record["row"].startswith("ours") or "tokens_per_second" not in record:
            continue
        config = configuration(replace(cases[record["row"]], rows=record["rows"]))
        layout = Layout(config.parallel, config.memory, config.batch.micro_sequences, 1, 1)
        job = Job(config, cases[record["row"]].vocabulary, record["length"])
        planned = step_time(job, layout, ClusterConfig(gpus=1, gpu="h100")).tokens_per_second
        steps.append(Own(record["row"], f"{record['rows']} x {record['length']}",
                         (record["tokens_per_second"], record["peak_gib"]),
                         (planned, memory(job, layout).total / 2**30)))
    return steps


def own_table() -> list[str]:
    """Return the lines of the table of Tidewheel's own steps, in Markdown."""
    lines = ["| Tidewheel on an H100 | tokens | tokens/s | planned | measured / planned | peak GiB | planned |",
             "|---|---|---|---|---|---|---|"]
    for step in own_steps():
        speed, peak = step.measured
        lines.append(f"| {step.row} | {step.tokens} | {speed:,.0f} | {step.planned[0]:,.0f} | "
                     f"{speed / step.planned[0]:.0%} | {peak:.1f} | {step.planned[1]:.1f} |")
    return lines


def main() -> None:
    print("| run | GPUs | length | tokens/s and GPU, published | the plan | published / plan |")
    print("|---|---|---|---|---|---|")
    for run in RUNS:
        speed, _ = predicted(run)
        print(f"| {run.source} | {run.gpus:,} {run.gpu} | {run.length:,} | {run.published:,.0f} | {speed:,.0f} | "
              f"{run.published / speed:.0%} |")
    for table in (mixtures_table(), own_table()):
        print()
        print("\n".join(table))


if __name__ == "__main__":
    main()
