"""Tests of groups of answers: equal to transformers, and functions of their key and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles import ORACLES, imported
from tidewheel.inference import group, prefill
from tidewheel.inference.decoding import released
from tidewheel.inference.draws import philox, uniforms
from tidewheel.inference.group import Answer, Sampling, choose, sample_group
from tidewheel.models import families
from tidewheel.models.attention import document_attention, document_mask
from tidewheel.models.attention_backends import EXACT_KEYS, exact, repeated
from tidewheel.models.decoder import Decoder
from tidewheel.train.precision import Precision, precision_context

PROMPT = list(range(20, 31))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    shape = {"num_layers": 2, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_sequence_length": 64,
             "attention": "exact"}
    torch.manual_seed(0)
    model = Decoder(families.KIND.build("llama", shape), 128).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.fill_(1)
    return model


def group_of(model: Decoder, samples: Sequence[int], precision: Precision = "fp32", **changes: int) -> list[Answer]:
    sampling = Sampling(30, stop=frozenset({3, 5, 7}), precision=precision)
    return sample_group(model, PROMPT, samples, sampling, key=changes.get("key", 1), stream=changes.get("stream", 2))


def test_philox_gives_the_published_numbers():
    zeros, ones = np.zeros((1, 4), np.uint32), np.full((1, 4), 0xFFFFFFFF, np.uint32)
    assert [hex(word) for word in philox(zeros, (0, 0))[0].tolist()] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert [hex(word) for word in philox(ones, (0xFFFFFFFF, 0xFFFFFFFF))[0].tolist()] == [
        "0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]
    pi = np.array([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32)
    assert [hex(word) for word in philox(pi, (0xA4093822, 0x299F31D0))[0].tolist()] == [
        "0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]


def test_numbers_are_uniform_and_belong_to_their_key():
    numbers = uniforms(5, 6, range(20_000), 7)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.histogram(numbers, 10, (0, 1))[0].min() > 1_800
    assert np.array_equal(uniforms(5, 6, [17, 3], 7), numbers[[17, 3]])
    others = [uniforms(4, 6, [3], 7), uniforms(5, 1 << 40 | 6, [3], 7), uniforms(5, 6, [3], 8)]
    assert len({float(number[0]) for number in (*others, numbers[3:4])}) == 4


def assert_bits_of_training(model: Decoder, answers: Sequence[Answer], precision: Precision) -> None:
    """Check that a forward pass over whole sequences gives each token the log-probability that it was sampled with."""
    count = len(answers)
    tokens = torch.full((count, 48), 1)
    segments = torch.full((count, 48), -1)
    for row, answer in enumerate(answers):
        tokens[row, :len(PROMPT) + len(answer.tokens)] = torch.tensor(PROMPT + answer.tokens)
        segments[row, :len(PROMPT) + len(answer.tokens)] = 0
    positions = torch.arange(48).expand(count, -1)
    with torch.no_grad(), precision_context(torch.device("cpu"), precision):
        every_token = model(tokens, positions, segments).float().log_softmax(-1)
    for row, answer in enumerate(answers):
        rows = every_token[row, len(PROMPT) - 1:len(PROMPT) - 1 + len(answer.tokens)]
        assert rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0].tolist() == answer.log_probabilities


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_answer_does_not_depend_on_its_group_and_has_the_bits_of_training(decoder: Decoder, precision: Precision):
    whole = group_of(decoder, range(20), precision)
    assert len({len(answer.tokens) for answer in whole}) > 3, "they end at different tokens"
    assert any(not answer.stopped for answer in whole)
    assert any(answer.stopped for answer in whole)
    for samples in ([0], [7, 3], list(range(16)), [19, 4, 0, 11, 2]):
        assert group_of(decoder, samples, precision) == [whole[sample] for sample in samples]
    assert group_of(decoder, [0], precision, stream=3) != whole[:1] != group_of(decoder, [0], precision, key=2)
    assert_bits_of_training(decoder, whole, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_answer_has_the_bits_of_training_for_every_number_of_threads(decoder: Decoder, precision: Precision):
    """Weights that were prepared for another number of threads, as the model before, are not used."""
    before = torch.get_num_threads()
    expected = group_of(decoder, range(5), precision)
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            answers = group_of(decoder, range(5), precision)
            assert_bits_of_training(decoder, answers, precision)
            assert answers == expected
            assert group_of(decoder, [3], precision) == [answers[3]]
    finally:
        torch.set_num_threads(before)


def test_a_group_converts_each_weight_to_16_bits_once(decoder: Decoder):
    matrices = {parameter.shape for parameter in decoder.parameters() if parameter.ndim == 2}

    class Conversions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16 and result.shape in matrices:
                self.count += isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float32
            return result

    released(decoder)
    with Conversions() as conversions:
        answers = group_of(decoder, range(3), "bf16")
    assert max(len(answer.tokens) for answer in answers) > 3
    assert 0 < conversions.count <= len([*decoder.parameters()])
    with Conversions() as conversions:
        assert group_of(decoder, range(3), "bf16") == answers
    assert not conversions.count
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_single_query_needs_no_copies_of_shared_keys(soft_cap: float | None):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, length, 8) for heads, length in ((6, 1), (2, 21), (2, 21)))
    mask = document_mask(torch.zeros(3, 1), places=torch.tensor([20]), key_segments=torch.zeros(3, 21),
                         key_places=torch.arange(21), window=7)
    shared = document_attention(q, k, v, mask, soft_cap=soft_cap)
    copied = document_attention(q, repeated(q, k), repeated(q, v), mask, soft_cap=soft_cap)
    torch.testing.assert_close(shared, copied)


class Ragged:
    """A partner whose replies have other lengths in each answer and turn."""

    turn_tokens = 4

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples, self._turns = list(samples), [0] * len(samples)

    def opening(self, answer: int) -> list[int]:
        return [40 + self._samples[answer] % 3] * (self._samples[answer] % 4)

    def ends(self, turn: Sequence[int]) -> bool:
        return turn[-1] in (11, 12)

    def reply(self, answer: int, turn: Sequence[int]) -> list[int] | None:
        self._turns[answer] += 1
        length = (self._samples[answer] + self._turns[answer]) % 5
        return None if self._turns[answer] > 4 else [50 + turn[-1] % 7 if turn else 50] * length


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_turns_have_the_bits_of_training_whatever_the_lengths_of_others(decoder: Decoder, precision: Precision):
    def sampled(samples: Sequence[int]) -> list[Answer]:
        sampling = Sampling(24, stop=frozenset({3, 5, 7}), precision=precision)
        return sample_group(decoder, PROMPT, samples, sampling, key=1, stream=2, partner=Ragged(samples))

    whole = sampled(range(12))
    assert len({len(answer.tokens) for answer in whole}) > 3
    assert sum(len(answer.written) for answer in whole) > 50
    assert all(answer.learnt[-1] for answer in whole)
    for samples in ([5], [7, 3], [11, 4, 0]):
        assert sampled(samples) == [whole[sample] for sample in samples]
    for answer in whole:
        tokens = torch.tensor([PROMPT + answer.tokens])
        padded = torch.nn.functional.pad(tokens, (0, 48 - tokens.shape[1]), value=1)
        segments = torch.where(torch.arange(48) < tokens.shape[1], 0, -1)[None]
        with torch.no_grad(), precision_context(torch.device("cpu"), precision):
            every = decoder(padded, torch.arange(48)[None], segments).float().log_softmax(-1)[0]
        values = every[len(PROMPT) - 1:].gather(1, padded[0, len(PROMPT):, None])[:len(answer.tokens), 0].tolist()
        assert [value if learnt else 0.0 for value, learnt in zip(values, answer.learnt)] == answer.log_probabilities


class Tool:
    """A partner that answers each turn of two tokens by a long reply."""

    turn_tokens = 2

    def __init__(self, reply: int) -> None:
        self._reply = reply

    def opening(self, answer: int) -> list[int]:
        return [40 + answer % 3] * 20

    def ends(self, turn: Sequence[int]) -> bool:
        return False

    def reply(self, answer: int, turn: Sequence[int]) -> list[int] | None:
        return [50 + (turn[0] + index) % 30 for index in range(self._reply)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_long_replies_are_computed_in_chunks_with_the_same_bits(decoder: Decoder, precision: Precision,
                                                                monkeypatch: pytest.MonkeyPatch):
    """The answers differ in no bit; the passes and their largest number of tokens follow from the chunk."""
    sizes: list[int] = []
    outputs: list[int] = []

    def sampled(chunk: int, partner: Tool) -> list[Answer]:
        monkeypatch.setattr(prefill, "CHUNK_TOKENS", chunk)
        sampling = Sampling(80, precision=precision)
        sizes.clear()
        outputs.clear()
        return sample_group(decoder, PROMPT * 4, range(4), sampling, key=1, stream=2, partner=partner)

    longer = Decoder(decoder.config.model_copy(update={"max_sequence_length": 160}), 128).requires_grad_(False)
    longer.load_state_dict(decoder.state_dict())
    decoder = longer
    without_modules = sampled(4096, Tool(20))
    monkeypatch.setattr(group, "prepared", lambda *_: None)
    decoder.register_forward_pre_hook(lambda _, arguments: sizes.append(arguments[0].numel()))
    decoder.register_forward_hook(lambda _, arguments, result: outputs.append(result.numel()))
    alone = sampled(16, Tool(20))
    assert max(sizes) <= 16 + 15, "of the prompt: a chunk, and what is too little for another"
    assert max(outputs) <= 16 * 128, "logits of one token a row, or of as many as exact products need"
    passes = len(sizes)
    assert alone == without_modules
    for chunk in (64, 4096):
        assert sampled(chunk, Tool(20)) == alone
        assert len(sizes) < passes
    assert len(sizes) == 1 + sum(alone[0].learnt), "one for the prompt, and one before or behind each sampled token"


def test_chunks_have_all_tokens_and_none_is_too_small():
    for length in range(1, 70):
        for size in (1, 7, 16):
            bounds = list(prefill.chunks(length, size, 5))
            assert [bound for bounds_of in bounds for bound in range(*bounds_of)] == list(range(length))
            assert all(end - first >= min(5, length, size) for first, end in bounds)
            assert all(end - first < size + 5 for first, end in bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_attention_has_the_same_bits_beside_any_queries_and_keys(dtype: torch.dtype):
    """Also where a sum over the keys is so long that libraries divide it by its length."""
    torch.manual_seed(0)
    length = 1216
    q, k, v = (torch.randn(1, heads, length, 16).to(dtype) for heads in (4, 2, 2))
    dense = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    whole = exact(q, k, v, dense, None)
    for last in (5, 255, 256, 300, 383, 384, 511, 700, 1023, 1100, 1215):
        for queries in (1, 3, 70):
            begin, seen = max(0, last + 1 - queries), -(-(last + 1) // EXACT_KEYS) * EXACT_KEYS
            part = exact(q[:, :, begin:last + 1], k[:, :, :seen], v[:, :, :seen], dense[:, :, begin:last + 1, :seen],
                         None)
            assert torch.equal(part, whole[:, :, begin:last + 1]), (last, queries)


def test_exact_attention_equals_torchs():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 21, 8, requires_grad=True) for heads in (4, 2, 2))
    segments = torch.tensor([[0] * 9 + [1] * 12, [0] * 21])
    results = []
    for kernel in ("exact", "masked"):
        out = document_attention(q, k, v, document_mask(segments, kernel, window=7))
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.allclose(ours, torchs, atol=1e-5) for ours, torchs in zip(*results))


def test_the_most_likely_tokens_are_those_of_transformers(tmp_path: Path):
    theirs = ORACLES["llama"].build()
    theirs.save_pretrained(tmp_path)
    theirs.generation_config.eos_token_id = None
    ours = imported(tmp_path)
    prompt = list(range(5, 17))
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    greedy = Sampling(20, temperature=0.0)
    [answer, other] = sample_group(ours, prompt, [0, 1], greedy, key=0, stream=0)
    assert prompt + answer.tokens == expected[0].tolist()
    assert other == answer


@given(st.integers(0, 12), st.floats(0.1, 1.0), st.integers(0, 1 << 32))
def test_draws_follow_the_restricted_distribution(top_k: int, top_p: float, seed: int):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, 2, (1, 10)).astype(np.float32))
    weights = logits.double().softmax(-1)[0].numpy()
    order = np.argsort(-weights, kind="stable")
    allowed = order[:top_k] if top_k else order
    allowed = [token for rank, token in enumerate(allowed) if weights[order[:rank]].sum() < top_p - 1e-9 or rank == 0]
    numbers = (np.arange(500) + 0.5) / 500
    tokens, values = choose(logits.expand(500, -1), numbers, Sampling(1, top_k=top_k, top_p=top_p))
    share = np.bincount(tokens, minlength=10) / 500
    expected = np.where(np.isin(np.arange(10), allowed), weights, 0)
    assert np.abs(share - expected / expected.sum()).max() < 0.005
    assert np.allclose(values, np.log(weights[tokens]), atol=1e-5)


def test_a_prompt_without_room_is_refused(decoder: Decoder):
    with pytest.raises(ValueError, match="64 tokens in a context of 64"):
        sample_group(decoder, [1] * 64, [0], Sampling(5), key=0, stream=0)
