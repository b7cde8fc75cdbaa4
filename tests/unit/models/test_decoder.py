"""Tests of the decoder: masking, positions, grouped heads, initial values."""

import math

import pytest
import torch

from tidewheel.inference.generate import generate
from tidewheel.models.attention import document_attention, document_mask
from tidewheel.models.decoder import IGNORED, Decoder, next_tokens
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter

VOCABULARY = 64
CONFIG = Llama(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, init_std=0.2)


def build(config: Llama = CONFIG, seed: int = 0) -> Decoder:
    model = Decoder(config, VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config, seed))
    return model.eval()


def packed(*lengths: int, padding: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and segment ids of one row of documents."""
    tokens = torch.randint(0, VOCABULARY, (1, sum(lengths) + padding), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.int64)])[None]
    segments = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])[None]
    return tokens, positions, segments


@torch.no_grad()
def test_a_token_sees_nothing_after_it():
    model, (tokens, positions, segments) = build(), packed(12)
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % VOCABULARY
    before, after = model(tokens, positions, segments), model(changed, positions, segments)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.allclose(before[0, 7:], after[0, 7:])


@torch.no_grad()
def test_a_document_does_not_see_its_neighbours():
    model, (tokens, positions, segments) = build(), packed(5, 6, 4, padding=3)
    changed = tokens.clone()
    for place in (*range(5), *range(11, 18)):  # everything but the middle document
        changed[0, place] = (changed[0, place] + 1) % VOCABULARY
    before, after = model(tokens, positions, segments), model(changed, positions, segments)
    assert torch.equal(before[0, 5:11], after[0, 5:11])
    assert torch.isfinite(after).all(), "padding must not give NaN"


@torch.no_grad()
def test_a_packed_document_gets_the_logits_it_gets_alone():
    model, (tokens, positions, segments) = build(), packed(5, 6, padding=2)
    alone = model(tokens[:, 5:11], positions[:, 5:11], torch.zeros(1, 6, dtype=torch.int64))
    torch.testing.assert_close(model(tokens, positions, segments)[0, 5:11], alone[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_logits_depend_on_positions():
    model, (tokens, positions, segments) = build(), packed(9)
    tokens[0, 0] = tokens[0, 1] + 1
    shuffled = positions * 2
    assert not torch.allclose(model(tokens, positions, segments), model(tokens, shuffled, segments), atol=1e-4)


def test_grouped_heads_equal_repeated_heads():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 10, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    segments = torch.tensor([[0] * 4 + [1] * 6, [0] * 10])
    out = document_attention(q, k, v, document_mask(segments))
    for row in range(2):
        for head in range(6):
            scores = q[row, head] @ k[row, head // 3].T / math.sqrt(8)
            seen = (segments[row][:, None] == segments[row][None]) & torch.ones(10, 10, dtype=torch.bool).tril()
            expected = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1) @ v[row, head // 3]
            torch.testing.assert_close(out[row, head], expected, rtol=1e-4, atol=1e-5)


def test_targets_stay_inside_their_document():
    tokens = torch.tensor([[5, 6, 7, 8, 9, 1, 1]])
    segments = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    assert next_tokens(tokens, segments).tolist() == [[6, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED]]


@torch.no_grad()
def test_the_loss_is_the_sum_over_targets():
    model, (tokens, positions, segments) = build(), packed(5, 6, padding=2)
    targets = next_tokens(tokens, segments)
    logits = model(tokens, positions, segments).log_softmax(-1)
    expected = -sum(logits[0, t, targets[0, t]] for t in range(13) if targets[0, t] != IGNORED)
    torch.testing.assert_close(model(tokens, positions, segments, targets), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_values_depend_on_name_and_seed_only(tied: bool):
    config = CONFIG.model_copy(update={"tie_embeddings": tied, "num_layers": 8})
    first, again, other = build(config), build(config), build(config, seed=1)
    assert (first.output is None) == tied
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b)
        assert name.endswith("norm.weight") or not torch.equal(a, c)
    into_stream = first.blocks[3].ffn.w2.weight.std().item()
    assert into_stream == pytest.approx(config.init_std / 4, rel=0.1), "depth-scaled: 1 / sqrt(2 x 8 layers)"


def test_the_count_of_parameters_matches_the_model():
    for preset in Llama.PRESETS:
        config = Llama.model_validate({"preset": preset, "tie_embeddings": False})
        with torch.device("meta"):
            model = Decoder(config, 1024)
        matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
        assert matrices == config.matmul_parameters(1024), preset


@pytest.mark.parametrize(("preset", "vocabulary", "parameters"), [
    ("1b", 128_256, 1_498_482_688), ("llama3_1b", 128_256, 1_235_814_400), ("llama3_8b", 128_256, 8_030_261_248),
    ("8b", 128_256, 8_030_261_248), ("llama3_70b", 128_256, 70_553_706_496),
    ("qwen3_0.6b", 151_936, 596_049_920), ("qwen3_1.7b", 151_936, 1_720_574_976), ("qwen3_8b", 151_936, 8_190_735_360)])
def test_presets_have_the_published_number_of_parameters(preset: str, vocabulary: int, parameters: int):
    """Compare with the model cards, which count a tied matrix once."""
    with torch.device("meta"):
        model = Decoder(Llama.model_validate({"preset": preset}), vocabulary)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_flops_equal_those_of_the_published_shape():
    """Llama-3.2-1B at 4096 with a vocabulary of 128,256: 9.0255e9 FLOPs a token, from its published shape:
    6 x 1,235,814,400 + 12 x 16 layers x 2048 x 4096."""
    config = Llama.model_validate({"preset": "llama3_1b"})
    assert config.flops_per_token(128_256, 4096) == pytest.approx(9.0255e9, rel=1e-4)


def test_generation_depends_on_the_seed_and_ends_at_the_stop_token():
    model = build()
    first = generate(model, [3, 4], tokens=12, context=8, seed=5)
    assert first == generate(model, [3, 4], tokens=12, context=8, seed=5)
    assert len(first) == 12
    assert first != generate(model, [3, 4], tokens=12, context=8, seed=6)
    greedy = generate(model, [3, 4], tokens=12, context=8, temperature=0)
    assert generate(model, [3, 4], tokens=12, context=8, temperature=0, stop={greedy[2]})[-1] == greedy[2]


@pytest.mark.parametrize(("values", "says"), [
    ({"num_heads": 4, "num_kv_heads": 3}, "multiple of num_kv_heads"),
    ({"dim": 60, "num_heads": 8}, "set head_dim"),
    ({"preset": "lama3_8b"}, "did you mean 'llama3_8b'"),
])
def test_impossible_shapes_are_refused(values: dict, says: str):
    with pytest.raises(ValueError, match=says):
        Llama.model_validate(values)
