"""Tests of the conversions between weights here and at Hugging Face."""

from __future__ import annotations

import torch

from tests.every import every
from tidewheel.models.conversion import Conversion, joined, per_expert, renamed, transposed


def shapes(conversion: Conversion, tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of their tensors, after checking that ours come back unchanged."""
    theirs = conversion.to_theirs(tensors)
    assert len(theirs) == len(conversion.theirs)
    back = conversion.to_ours(theirs)
    assert len(back) == len(conversion.ours)
    assert all(torch.equal(before, after) for before, after in zip(tensors, back))
    return [tuple(tensor.shape) for tensor in theirs]


@every([(renamed("a", "b"), [(3, 2)], [(3, 2)]), (transposed("a", "b"), [(3, 2)], [(2, 3)]),
        (joined(("q", "k"), "qk", (4, 2)), [(4, 3), (2, 3)], [(6, 3)]),
        (joined(("q", "k"), "qk", (4, 2), transpose=True), [(4, 3), (2, 3)], [(3, 6)]),
        (joined(("w1", "w3"), "gate_up", (5, 5), dim=1), [(2, 5, 3), (2, 5, 3)], [(2, 10, 3)]),
        (per_expert("w1", "experts.{}.w1", 2), [(2, 5, 3)], [(5, 3), (5, 3)])])
def test_a_conversion_and_its_inverse_give_the_same_weights(case):
    conversion, ours, theirs = case
    assert shapes(conversion, [torch.randn(shape) for shape in ours]) == theirs


def test_weights_are_put_side_by_side_in_their_order():
    gate, up = torch.zeros(2, 1, 3), torch.ones(2, 1, 3)
    (whole,) = joined(("w1", "w3"), "gate_up", (1, 1), dim=1).to_theirs([gate, up])
    assert whole[:, 0].max() == 0
    assert whole[:, 1].min() == 1
    assert per_expert("w1", "experts.{}.w1", 2).theirs == ("experts.0.w1", "experts.1.w1")
