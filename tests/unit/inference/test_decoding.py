"""Tests of decoding without modules: the bits of the modules, whatever is decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import ORACLES, imported
from tidewheel.inference.decoding import Rows, Weights, prepared, released
from tidewheel.inference.draws import Numbers, uniforms
from tidewheel.inference.group import Sampling, sample_group, sample_groups
from tidewheel.inference.matrices import Matrix, cancelling
from tidewheel.inference.module_rows import module_rows
from tidewheel.models.decoder import Decoder
from tidewheel.train.precision import Precision

PROMPT = list(range(5, 14))
TOKENS = 6
DECODED = ("llama", "qwen2", "qwen3", "olmo2", "gpt2")
"""Families whose blocks are decoded without modules: with norms of heads, norms of all heads, biases, no RoPE."""


def model_of(folder: Path, family: str, attention: str = "exact") -> Decoder:
    ORACLES[family].build().save_pretrained(folder)
    model = imported(folder)
    other = Decoder(model.config.model_copy(update={"attention": attention}), model.vocabulary_size)
    other.load_state_dict(model.state_dict())
    return other.requires_grad_(False)


@torch.inference_mode()
def logits_of(model: Decoder, rows: int, precision: Precision, prompt: Sequence[int] = PROMPT
              ) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the logits behind a prompt and some tokens, as they are decoded and as the modules compute them."""
    capacity = len(prompt) + TOKENS
    weights = Weights.of(model, precision)
    assert weights is not None
    decoded = Rows(weights, [prompt], rows, capacity)
    random = torch.Generator().manual_seed(rows)
    with module_rows(model, prompt, rows, capacity, precision) as modules:
        pairs = [(decoded.logits, modules.logits)]
        for _ in range(TOKENS - 1):
            tokens = torch.randint(0, model.vocabulary_size, (rows,), generator=random)
            decoded.step(tokens[:, None])
            modules.step(tokens[:, None])
            pairs.append((decoded.logits, modules.logits))
    return pairs


@pytest.mark.parametrize("family", DECODED)
def test_logits_have_the_bits_of_the_modules(tmp_path: Path, family: str):
    model = model_of(tmp_path, family)
    for precision in ("fp32", "bf16"):
        for rows in (1, 2, 5):
            assert all(torch.equal(ours, theirs) for ours, theirs in logits_of(model, rows, precision))


def test_logits_have_the_bits_of_the_modules_in_long_contexts(tmp_path: Path):
    """Values of more than 128 keys are added in blocks. No length leaves part of an activation over (`VECTORS`)."""
    short = model_of(tmp_path, "llama")
    model = Decoder(short.config.model_copy(update={"max_sequence_length": 600}), short.vocabulary_size)
    model.load_state_dict(short.state_dict())
    model.requires_grad_(False)
    for precision in ("fp32", "bf16"):
        for length in (252, 300, 508):
            prompt = [(7 * index) % short.vocabulary_size for index in range(length)]
            assert all(torch.equal(ours, theirs) for ours, theirs in logits_of(model, 3, precision, prompt))


def test_several_tokens_of_a_row_are_computed_one_after_the_other(tmp_path: Path):
    model = model_of(tmp_path, "qwen3")
    weights = Weights.of(model, "fp32")
    assert weights is not None
    with torch.inference_mode():
        together, alone = (Rows(weights, [PROMPT], 2, 20) for _ in range(2))
        together.step(torch.tensor([[3, 4, 5], [6, 7, 8]]))
        for column in ([3, 6], [4, 7], [5, 8]):
            alone.step(torch.tensor(column)[:, None])
        assert torch.equal(together.logits, alone.logits)


def test_logits_without_exact_attention_are_near_those_of_the_modules(tmp_path: Path):
    for ours, theirs in logits_of(model_of(tmp_path, "llama", "masked"), 3, "fp32"):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_has_other_parts_is_left_to_the_modules(tmp_path: Path):
    model = model_of(tmp_path, "mixtral", "masked")
    assert Weights.of(model, "fp32") is None
    greedy = Sampling(TOKENS, temperature=0.0)
    [first], [second] = sample_groups(model, [PROMPT, PROMPT[::-1]], [0], greedy, key=1, streams=[2, 3])
    assert first == sample_group(model, PROMPT, [0], greedy, key=1, stream=2)[0]
    assert second == sample_group(model, PROMPT[::-1], [0], greedy, key=1, stream=3)[0]


def test_groups_that_are_decoded_together_are_those_decoded_alone(tmp_path: Path):
    model = model_of(tmp_path, "qwen3")
    prompts = [PROMPT, PROMPT[::-1], [20] * len(PROMPT)]
    for precision in ("fp32", "bf16"):
        sampling = Sampling(9, stop=frozenset(range(40, 60)), precision=precision)
        together = sample_groups(model, prompts, range(4), sampling, key=1, streams=[7, 8, 9])
        assert len({len(answer.tokens) for group in together for answer in group}) > 3
        assert together == [sample_group(model, prompt, range(4), sampling, key=1, stream=stream)
                            for prompt, stream in zip(prompts, (7, 8, 9))]
    with pytest.raises(ValueError, match="the same length"):
        sample_groups(model, [PROMPT, PROMPT[1:]], range(2), sampling, key=1, streams=[7, 8])


def test_prepared_weights_follow_the_model(tmp_path: Path):
    model = model_of(tmp_path, "llama")
    first = prepared(model, "fp32")
    assert prepared(model, "fp32") is first
    assert prepared(model, "bf16") is not first
    before = prepared(model, "bf16")
    with torch.no_grad():
        model.weight.mul_(2)
    assert prepared(model, "bf16") is not before
    before = prepared(model, "bf16")
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert prepared(model, "bf16") is not before
    released(model)
    assert not any(isinstance(value, Weights) for value in vars(model).values())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.sampled_from([(64,), (48, 16, 16), (8,)]), st.sampled_from([32, 63, 96]), st.booleans(),
       st.sampled_from([torch.float32, torch.bfloat16]))
def test_products_of_few_rows_have_the_bits_of_many(rows: int, outputs: tuple[int, ...], inputs: int, has_bias: bool,
                                                   dtype: torch.dtype):
    random = torch.Generator().manual_seed(rows)
    layers = [(torch.randn(size, inputs, generator=random), torch.randn(size, generator=random) if has_bias else None)
              for size in outputs]
    matrix = Matrix(layers, dtype, exact=True)
    x = torch.randn(100, inputs, generator=random).to(dtype)
    expected = torch.cat([torch.nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
                          for weight, bias in layers], dim=1)
    assert torch.equal(matrix(x[:rows]), expected[:rows])
    assert torch.equal(matrix.many(x[:rows]), expected[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_that_cancel_show_another_order_of_a_sum(dtype: torch.dtype):
    x, weights = cancelling(16, 32, 64, dtype)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert (x.double() @ weights.double().T).abs().max() < 1e-12
    same = (x @ weights.T) == (x[:, order] @ weights[:, order].T)
    assert same.float().mean() < 0.2


def test_numbers_of_many_places_are_those_of_each():
    numbers = Numbers(3, [5, 5, 1 << 40], [0, 7, 2], together=True)
    for place in range(70):
        expected = [float(uniforms(3, stream, [sample], place)[0])
                    for stream, sample in ((5, 0), (5, 7), (1 << 40, 2))]
        assert numbers.of([0, 1, 2], [place] * 3).tolist() == expected
        assert numbers.of([2, 0], [place] * 2).tolist() == [expected[2], expected[0]]
