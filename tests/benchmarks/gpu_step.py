"""Measure one training step on one device for Tidewheel, torchtitan and a plain transformers loop.

    python -m tests.benchmarks.gpu_step [--preset 1b] [--lengths 4096 8192] [--tokens 32768] [--document 0] [--no-fp8]

Each side trains the same Llama shape on the same few batches: 5 warm-up steps, then `--steps` timed ones between two
synchronisations. A row is valid only if its loss fell. Settings: fp32 weights, bf16 products (autocast), fused AdamW,
gradients clipped at norm 1, compiled where the side supports it. torchtitan's side is its model, its per-block compile
and its loss, as its trainer combines them on one device, if it can be imported (0.2.2 runs on torch 2.11). A batch has
`--tokens` tokens. Documents are whole rows unless `--document` cuts them, and then only Tidewheel masks them.

MFU = tokens/s x FLOPs per token / the dense bf16 peak (fp8 rows too); FLOPs per token = 6 N + 12 layers x heads x head
width x L (`Llama.flops_per_token`). Without a GPU a tiny shape runs on the CPU, which only shows that the script works.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.decoder import next_tokens
from tidewheel.models.families import Llama
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.metrics.gpu_peaks import peak_of_device
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.precision import native_fp8
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, train_step

WARM, BATCHES, RATE = 5, 2, 3e-4
VOCABULARY = 128_256
TINY: dict[str, Any] = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 256, "qk_norm": False,
                        "rope_theta": 5e5}

Step = Callable[[MicroBatch], float | torch.Tensor]
"""A function that does one optimizer step and returns the mean loss."""


@dataclass(frozen=True)
class Case:
    """The model, batch and settings that all sides train."""

    model: Llama
    vocabulary: int
    length: int
    rows: int
    device: torch.device
    compiled: bool


def main() -> int:
    """Measure all sides, print a table for each length and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="1b")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    arguments.add_argument("--tokens", type=int, default=32_768)
    arguments.add_argument("--document", type=int, default=0)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--no-fp8", action="store_true")
    options = arguments.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("no GPU here: a tiny shape on the CPU, which shows that the script works and nothing else")
        options.lengths, options.tokens, options.steps = [128], 512, 5
    sides = _sides(device, fp8=not options.no_fp8)
    for length in options.lengths:
        model = build(Llama, {"preset": options.preset} if device.type == "cuda" else TINY)
        case = Case(model, VOCABULARY if device.type == "cuda" else 512, length, max(1, options.tokens // length),
                    device, device.type == "cuda")
        rows = [_measure(name, make, case, options) for name, make in sides.items()]
        print_table(rows, title=f"{_device_name(device)}, torch {torch.__version__}, {case.rows} x {length} tokens")
    for name in ("torchtitan", "transformers"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed here: its row is missing")
    return 0


def _sides(device: torch.device, *, fp8: bool) -> dict[str, Callable[[Case], Step]]:
    sides: dict[str, Callable[[Case], Step]] = {"Tidewheel, bf16": lambda case: tidewheel_step(case, "bf16")}
    if fp8 and native_fp8(device):
        sides["Tidewheel, fp8"] = lambda case: tidewheel_step(case, "fp8")
    if importlib.util.find_spec("torchtitan") is not None:
        sides["torchtitan, bf16"] = torchtitan_step
    if importlib.util.find_spec("transformers") is not None:
        sides["transformers, bf16"] = transformers_step
    return sides


def _measure(name: str, make: Callable[[Case], Step], case: Case, options: Any) -> dict[str, str]:
    cuda = case.device.type == "cuda"
    batches = [_batch(case, index, options.document) for index in range(BATCHES)]
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        step, losses = make(case), []
        for index in range(WARM):
            losses.append(step(batches[index % BATCHES]))
        _wait(case.device)
        began = time.perf_counter()
        for index in range(WARM, WARM + options.steps):
            losses.append(step(batches[index % BATCHES]))
        _wait(case.device)
        seconds = (time.perf_counter() - began) / options.steps
        peak_memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:  # another peer version, or no memory
        return {"": name, "tokens/s": "failed", "loss": " ".join(f"{type(error).__name__}: {error}".split())[:90]}
    finally:
        step = None
        gc.collect()
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()
    speed, first, last = case.rows * case.length / seconds, float(losses[0]), float(losses[-1])
    peak = peak_of_device(_device_name(case.device))
    mfu = speed * case.model.flops_per_token(case.vocabulary, case.length) / peak if peak else None
    return {"": name, "tokens/s": f"{speed:,.0f}", "MFU": f"{mfu:.1%}" if mfu else "-",
            "ms a step": f"{1000 * seconds:.1f}", "peak GiB": f"{peak_memory:.1f}" if peak_memory else "-",
            "loss": f"{first:.3f} to {last:.3f}" + ("" if last < first else ": IT DID NOT FALL")}


def tidewheel_step(case: Case, precision: str) -> Step:
    """Return Tidewheel's step, as in its training loop."""
    config = build(TrainConfig, {
        "model": {**case.model.canonical(), "vocabulary_size": case.vocabulary}, "precision": precision,
        "compile": case.compiled, "optimizer": {"learning_rate": RATE},
        "batch": {"global_sequences": case.rows, "micro_sequences": case.rows, "virtual_ranks": 1}})
    runtime = Runtime(device=case.device)
    model = parallel.build(config, case.vocabulary, runtime)
    optimizer = build_optimizer(model, config.optimizer)
    parallel.init_weights(model, 0)
    optimizer.started()
    optimizer.set_learning_rate(RATE)
    collectives = Collectives(runtime)

    def step(micro: MicroBatch) -> float:
        return train_step(model, optimizer, [micro], collectives, virtual_ranks=1, clip_norm=1.0,
                          precision=config.precision).loss

    return step


def torchtitan_step(case: Case) -> Step:
    """Return the step of torchtitan's Llama 3: fp32 weights under autocast, compiled blocks and loss, fused AdamW."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_compile

    shape = case.model
    with torch.device(case.device):
        model = Transformer(TransformerModelArgs(
            dim=shape.dim, n_layers=shape.num_layers, n_heads=shape.num_heads, n_kv_heads=shape.kv_heads,
            vocab_size=case.vocabulary, multiple_of=256, ffn_dim_multiplier=shape.ffn_width / (8 * shape.dim / 3),
            norm_eps=shape.norm_epsilon, rope_theta=shape.rope_theta, max_seq_len=case.length))
        model.init_weights(buffer_device=case.device)
    loss_of = cross_entropy_loss
    if case.compiled:
        apply_compile(model, SimpleNamespace(backend="inductor"))
        loss_of = torch.compile(loss_of)
    return _plain_step(case, model, lambda micro: loss_of(model(micro.tokens), micro.targets) / micro.num_targets)


def transformers_step(case: Case) -> Step:
    """Return the step of transformers' LlamaForCausalLM in the loop of its examples."""
    import transformers

    shape = case.model
    with torch.device(case.device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=case.vocabulary, hidden_size=shape.dim, intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head_width, rms_norm_eps=shape.norm_epsilon,
            max_position_embeddings=case.length, tie_word_embeddings=shape.tie_embeddings, use_cache=False,
            attn_implementation="sdpa"))
    return _plain_step(case, model, lambda micro: model(input_ids=micro.tokens, labels=micro.tokens).loss)


def _plain_step(case: Case, model: torch.nn.Module, loss_of: Callable[[MicroBatch], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=case.device.type == "cuda")

    def step(micro: MicroBatch) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(case.device.type, torch.bfloat16):
            loss = loss_of(micro)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    return step


def _batch(case: Case, index: int, document: int) -> MicroBatch:
    """Return random tokens, whose loss falls by memorising them; a document is a row, or `document` tokens."""
    generator = torch.Generator().manual_seed(index)
    shape = (case.rows, case.length)
    tokens = torch.randint(0, case.vocabulary, shape, generator=generator)
    row_positions = torch.arange(case.length).expand(shape)
    segments = row_positions // document if document else torch.zeros_like(row_positions)
    positions = row_positions % document if document else row_positions
    targets = next_tokens(tokens, segments)
    return MicroBatch(tokens=tokens.to(case.device), positions=positions.contiguous().to(case.device),
                      segment_ids=segments.contiguous().to(case.device), targets=targets.to(case.device),
                      virtual_rank=0, num_tokens=tokens.numel(), num_targets=int((targets >= 0).sum()))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
