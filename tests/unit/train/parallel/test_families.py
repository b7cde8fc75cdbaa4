"""Tests of what built-in families bring to a layout. `tests.benchmarks.equivalence` trains all in every layout."""

from __future__ import annotations

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import assert_same_training, config

CASES = (
    ("gpt2", {"max_sequence_length": 64}, {"tensor": 2}),  # learned positions, LayerNorm, biases
    ("gpt2", {"tie_embeddings": False, "max_sequence_length": 64}, {"data": "zero3"}),
    ("olmo2", {}, {"tensor": 2}),  # a norm over the heads of both ranks, norms after each part
    ("gemma", {"sliding_window": 7, "attention_soft_cap": 1.0, "final_soft_cap": 1.0}, {"tensor": 2}),
    # two masks and two RoPEs
    ("gemma", {"sliding_window": 7, "qk_norm": True, "local_rope_theta": 100.0}, {"context": 2}),
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
