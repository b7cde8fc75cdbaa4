"""Parts of torch's normal values that are drawn without those before them, beside torch's own."""

from __future__ import annotations

import random

import pytest
import torch

from tidewheel.models import random_jump
from tidewheel.models.random_jump import DEGREE, WORDS, can_jump, characteristic_polynomial, normal_values

SEED = 77 << 33 | 5


def drawn(count: int, std: float = 1.0) -> torch.Tensor:
    """All values, drawn by torch."""
    return torch.empty(count).normal_(0.0, std, generator=torch.Generator().manual_seed(SEED))


@pytest.fixture
def always_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_jump, "DRAWN", 0)


def test_this_torch_has_the_generator_that_is_assumed():
    assert can_jump()


@pytest.mark.parametrize("count", [1, 5, 16, 17, 31, 32, 100, 1000, 4096, 50_003])
@pytest.mark.parametrize("jumps", [True, False])
def test_every_part_has_torchs_values(count: int, jumps: bool, request: pytest.FixtureRequest):
    if jumps:
        request.getfixturevalue("always_jump")
    whole, chance = drawn(count, 0.3), random.Random(count)
    parts = [(0, count), (count - 1, count), (0, 1), (count // 2, count // 2)]
    parts += [tuple(sorted(chance.choices(range(count + 1), k=2))) for _ in range(6)]  # type: ignore[misc]
    for start, stop in parts:
        assert torch.equal(normal_values(SEED, count, start, stop, 0.3), whole[start:stop]), (start, stop)


def test_far_parts_and_the_last_one():
    count = random_jump.DRAWN + 1_000_003
    whole = drawn(count)
    far = random_jump.DRAWN + 77
    for start, stop in ((count - 1000, count), (count - 3, count), (far, far + 50_000)):
        assert torch.equal(normal_values(SEED, count, start, stop), whole[start:stop]), (start, stop)


def test_other_releases_of_torch_draw_everything(monkeypatch: pytest.MonkeyPatch, always_jump: None):
    def refuse(*arguments: object) -> torch.Tensor:
        raise AssertionError("jumped")

    monkeypatch.setattr(random_jump, "can_jump", lambda: False)
    monkeypatch.setattr(random_jump, "_state_at", refuse)
    assert torch.equal(normal_values(SEED, 1000, 500, 600), drawn(1000)[500:600])


def test_the_polynomial_annihilates_the_generators_words():
    """Its degree is that of the generator's period, 2^19937 - 1, so no other polynomial of the degree does."""
    polynomial = characteristic_polynomial()
    assert polynomial.bit_length() - 1 == DEGREE
    first = torch.Generator().manual_seed(3).get_state()[24:24 + 8 * WORDS].view(torch.int64).numpy().astype("uint32")
    words = random_jump._words(first, DEGREE + 64)
    for begin in range(1, 60):
        total = 0
        for term in random_jump._terms(polynomial):
            total ^= int(words[begin + term])
        assert total == 0
