"""Tests of what built-in families bring to a layout. `tests.benchmarks.equivalence` trains all in every layout."""

from __future__ import annotations

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import assert_same_training, config

LATENT = {"num_experts": 4, "expert_ffn_dim": 16, "first_dense_layers": 1, "key_rank": 16, "plain_head_dim": 8,
          "turning_head_dim": 4, "value_head_dim": 8}
CASES = (
    ("gpt2", {"max_sequence_length": 64}, {"tensor": 2}),  # learned positions, LayerNorm, biases
    ("gpt2", {"tie_embeddings": False, "max_sequence_length": 64}, {"data": "zero3"}),
    ("olmo2", {}, {"tensor": 2}),  # a norm over the heads of both ranks, norms after each part
    ("gemma", {"sliding_window": 7, "attention_soft_cap": 1.0, "final_soft_cap": 1.0}, {"tensor": 2}),
    # two masks and two RoPEs
    ("gemma", {"sliding_window": 7, "qk_norm": True, "local_rope_theta": 100.0}, {"context": 2}),
    # latent attention: matrices that each rank holds whole, and others that are cut by heads; shared experts
    ("deepseek_v3", {**LATENT, "query_rank": 12}, {"tensor": 2}), ("deepseek_v3", LATENT, {"context": 2}),
    # biases of experts, sinks
    ("gpt_oss", {"num_experts": 4, "sliding_window": 7}, {"tensor": 2}),
    ("gpt_oss", {"num_experts": 4, "sliding_window": 7}, {"data": "zero3"}),
    ("olmoe", {"num_experts": 4}, {"tensor": 2}), ("qwen3_moe", {"num_experts": 4}, {"tensor": 2}),
)


def _train() -> None:
    for family, settings, parallel in CASES:
        changes = {"loss": {"chunk_tokens": 24}} if family == "gemma" else {}
        # without RoPE the gradient of the keys' bias is 0, and Adam would divide rounding by its own size
        optimizer = {"epsilon": 1e-4}
        assert_same_training(config(parallel, model={"kind": family, **settings}, optimizer=optimizer, **changes),
                             steps=2)


def test_families_learn_the_same_in_layouts_that_cut_what_only_they_have():
    on_ranks(2, _train)
