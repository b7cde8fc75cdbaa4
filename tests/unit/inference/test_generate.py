"""Tests of generation with and without a cache, and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.every import every
from tidewheel.inference.generate import cached, draw, generate
from tidewheel.models import families
from tidewheel.models.decoder import Decoder
from tidewheel.models.initial_values import init_parameter

VOCABULARY = 96


def decoder(**changes) -> Decoder:
    config = families.of_shape({"preset": "debug", "init_std": 0.2, **changes})
    model = Decoder(config, VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config, 3))
    return model


@every([{}, {"qk_norm": False, "tie_embeddings": False, "num_kv_heads": 4},
        *({"kind": family} for family in families.KIND.built_in())])
def test_cached_logits_equal_those_of_the_whole_sequence(changes: dict[str, Any]):
    """The sequence is given in pieces of several sizes."""
    model, tokens = decoder(**changes), torch.randint(0, VOCABULARY, (1, 24))
    positions = torch.arange(24)[None]
    with torch.no_grad():
        whole = model(tokens, positions, torch.zeros_like(tokens))
        with cached(model, 24):
            pieces = [model(tokens[:, a:b], positions[:, a:b], torch.zeros_like(tokens[:, a:b]))
                      for a, b in ((0, 7), (7, 8), (8, 9), (9, 20), (20, 24))]
        again = model(tokens, positions, torch.zeros_like(tokens))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(whole, again)  # nothing of the cache is left


@pytest.mark.parametrize("drawing", [{"temperature": 0}, {"top_k": 5}, {"top_k": 0, "top_p": 0.7, "temperature": 1.3}])
@pytest.mark.parametrize("context", [64, 12])
def test_text_is_the_same_with_and_without_cache(drawing: dict, context: int):
    """One context is too short for the whole text."""
    model, prompt = decoder(), [5, 17, 3, 80]
    one, other = (generate(model, prompt, tokens=30, context=context, seed=4, cache=cache, **drawing)
                  for cache in (True, False))
    assert one == other
    assert len(one) == 30
    stopped = generate(model, prompt, tokens=30, context=context, seed=4, stop={one[6]}, **drawing)
    assert stopped == one[:one.index(one[6]) + 1]


def test_greedy_text_equals_that_of_transformers():
    """Load the same weights into transformers' LlamaForCausalLM."""
    transformers = pytest.importorskip("transformers")
    model = decoder(qk_norm=False)
    c = model.config
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=c.dim, intermediate_size=c.ffn_width, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.kv_heads, head_dim=c.head_width,
        rms_norm_eps=c.norm_epsilon, rope_theta=c.rope_theta, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=0)).eval()
    names = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
             "attention.wo": "self_attn.o_proj", "ffn.w1": "mlp.gate_proj", "ffn.w3": "mlp.up_proj",
             "ffn.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {"model.embed_tokens.weight": model.embedding.weight, "lm_head.weight": model.embedding.weight,
             "model.norm.weight": model.norm.weight}
    state |= {f"model.layers.{i}.{theirs}.weight": block.get_submodule(ours).weight
              for i, block in enumerate(model.blocks) for ours, theirs in names.items()}
    peer.load_state_dict(state)
    prompt = [9, 2, 33]
    theirs = peer.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt):].tolist()
    assert generate(model, prompt, tokens=40, context=64, temperature=0) == theirs


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=12), st.integers(0, 12), st.floats(0.05, 1.0),
       st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_draws_stay_inside_top_k_and_top_p(logits: list[float], top_k: int, top_p: float, seed: int):
    """No draw is outside the k most likely tokens or the fewest that reach p."""
    chosen = draw(torch.tensor(logits), torch.Generator().manual_seed(seed), top_k=top_k, top_p=top_p)
    probabilities = torch.softmax(torch.tensor(logits), 0)
    likelier = [p for p in probabilities.tolist() if p > float(probabilities[chosen])]
    if top_k:
        assert len(likelier) < top_k
        kept = probabilities.topk(min(top_k, len(logits))).values.sum()
        likelier = [p / float(kept) for p in likelier]
    assert sum(likelier) < top_p + 1e-6
