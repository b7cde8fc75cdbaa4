"""Tests of the number types of outer gradients: bounds of their errors, and the same bits however rows are sharded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.outer.quantise import BLOCK, MOST, decode, encode

KINDS = ("fp32", "bf16", "int8", "int4")


def rows(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * torch.logspace(-6, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 200), st.integers(0, 99))
def test_values_are_within_half_a_step_of_their_block(kind: str, number: int, width: int, seed: int):
    gradient = rows(seed, number, width)
    gradient[0] = 0
    sent = encode(gradient, kind)
    back = decode(sent, kind, width)
    assert all(tensor.shape[0] == number for tensor in sent.values()), "they are sharded by rows like the gradient"
    assert not back[0].any()
    if kind == "fp32":
        assert torch.equal(back, gradient)
    elif kind == "bf16":
        assert torch.equal(back, gradient.bfloat16().float())
    else:
        for start in range(0, width, BLOCK[kind]):
            block = gradient[:, start:start + BLOCK[kind]]
            step = block.abs().amax(dim=1, keepdim=True) / MOST[kind]
            bound = step * (0.5 + MOST[kind] / 256) * 1.01  # half a step, and the scale's own rounding
            assert ((back[:, start:start + BLOCK[kind]] - block).abs() <= bound).all()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 12), st.integers(1, 150), st.integers(1, 5))
def test_the_bits_do_not_depend_on_how_rows_are_shared(kind: str, number: int, width: int, ranks: int):
    gradient = rows(number, number, 2, width)
    whole = decode(encode(gradient, kind), kind, width)
    parts = [decode(encode(part, kind), kind, width) for part in gradient.chunk(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    empty = encode(gradient[:0], kind)
    assert decode(empty, kind, width).shape == (0, 2, width)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_and_scalars_keep_their_shape(kind: str):
    for gradient in (torch.tensor([0.1, -3.0, 7.5]), torch.tensor(0.25)):
        sent = encode(gradient, kind)
        assert {name: tensor.shape for name, tensor in sent.items()} == {"values": gradient.shape}
        torch.testing.assert_close(decode(sent, kind, 3), gradient, rtol=0.01, atol=0)


def test_four_bits_take_half_a_byte():
    assert [sum(tensor.nbytes for tensor in encode(torch.ones(4, 256), kind).values()) for kind in KINDS] == [
        4096, 2048, 1024 + 16, 512 + 32]
