"""Planned memory of adapters and quantised bases, beside what papers report and what is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.every import every
from tidewheel.config import build
from tidewheel.models import adapters, families
from tidewheel.models.adapting import attach
from tidewheel.models.decoder import Decoder
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.memory import memory
from tidewheel.plan.memory_tier import state_bytes
from tidewheel.plan.offload import host_bytes
from tidewheel.train import optimizers
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig

GB = 1e9
LORA = {"kind": "lora", "rank": 16}
QLORA = {**LORA, "base": "nf4"}
LLAMA2_7B = {"dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 11008, "qk_norm": False}


def planned(shape: dict[str, Any], vocabulary: int, adapter: dict[str, Any] | None, ranks: int, length: int = 2048,
            **parallel: Any) -> tuple[Job, Layout]:
    """Return a bf16 run with 8-bit AdamW that recomputes blocks, and its layout."""
    settings: dict[str, Any] = {"model": shape, "precision": "bf16", "parameters": "bf16",
                                "optimizer": {"kind": "adamw8bit"}, "adapter": adapter}
    layout = Layout(ParallelConfig(**{"data": "ddp", **parallel}), MemoryConfig(activation_checkpointing="full"), 1,
                    ranks, 1)
    return Job(build(TrainConfig, settings), vocabulary, length), layout


@pytest.mark.parametrize(("shape", "vocabulary", "adapter", "ranks", "card", "data"), [
    ({"preset": "8b"}, 128_256, QLORA, 1, 24, "ddp"),
    ({"preset": "70b"}, 128_256, QLORA, 2, 80, "zero3"),
    (LLAMA2_7B, 32_000, LORA, 4, 24, "zero3"),
])
def test_what_fits_a_card(shape: dict[str, Any], vocabulary: int, adapter: dict[str, Any], ranks: int, card: int,
                          data: str):
    run, layout = planned(shape, vocabulary, adapter, ranks, data=data)
    assert memory(run, layout).total < card * GB
    whole, _ = planned(shape, vocabulary, None, ranks, data=data)
    assert memory(whole, layout).total > card * GB


def test_paged_moments_are_in_host_memory():
    run, layout = planned({"preset": "8b"}, 128_256, QLORA, 1)
    paged = Job(run.config.model_copy(update={"optimizer": optimizers.KIND.build("adamw8bit", {"paged": True})}),
                run.vocabulary_size, run.sequence_length)
    moments = memory(run, layout).optimizer
    assert moments > 2 * run.saved_parameters
    assert memory(paged, layout).optimizer == 0
    assert host_bytes(paged, layout) == moments
    assert host_bytes(run, layout) == 0
    assert paged.checkpoint_bytes == run.checkpoint_bytes


def test_the_arithmetic_of_the_papers():
    """QLoRA: double quantisation leaves 0.127 bits a parameter for scales (arXiv:2305.14314, section 3).

    LoRA: 4.7 M parameters for rank 1 of queries and values of GPT-3 (arXiv:2106.09685, table 6).
    """
    run, layout = planned({"preset": "70b"}, 128_256, QLORA, 1)
    blocks = run.costs.matrices
    base = memory(run, layout).parameters - 4 * run.saved_parameters - 2 * (run.parameters - blocks)
    bits = 8 * base / blocks
    assert bits == pytest.approx(4.127, abs=0.01)
    gpt3 = families.KIND.build("llama", {"dim": 12_288, "num_layers": 96, "num_heads": 96})
    lora = adapters.KIND.build("lora", {"rank": 1, "targets": ["wq", "wv"]})
    assert lora.parameters(gpt3, 50_257) == pytest.approx(4.7e6, rel=0.01)
    run, layout = planned({"preset": "8b"}, 128_256, QLORA, 1)
    assert state_bytes(run, layout) == run.checkpoint_bytes < 0.3 * GB


@every((("lora", {"rank": 3, "ranks": {"wq": 5}, "targets": ["attention", "embedding"]}), ("dora", {"rank": 3}),
        ("ia3", {}), ("bottleneck", {"width": 5}), ("prefix_tuning", {"tokens": 7}), ("prompt_tuning", {"tokens": 7}),
        ("lora", {"rank": 3, "ranks": {"w2": 5}, "family": "qwen3_moe"}), ("ia3", {"family": "deepseek_v3"}),
        ("lora", {"targets": ["experts", "shared"], "family": "deepseek_v3"}),
        ("bottleneck", {"width": 5, "family": "qwen3_moe"})))
def test_the_number_of_parameters_is_that_of_the_model(case: tuple[str, dict[str, Any]]):
    kind, settings = case
    family = str({"family": "llama", **settings}["family"])
    settings = {name: value for name, value in settings.items() if name != "family"}
    shape = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96}
    mixture = {"num_experts": 4, "expert_ffn_dim": 32}
    if family == "deepseek_v3":
        mixture |= {"shared_experts": 2, "first_dense_layers": 1}
        del shape["num_kv_heads"]
    config = families.KIND.build(family, shape if family == "llama" else {**shape, **mixture})
    adapter = adapters.KIND.build(kind, settings)
    with torch.device("meta"):
        model = Decoder(config, 50)
        attach.attach(model, adapter)
    built = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert adapter.parameters(config, 50) == built
