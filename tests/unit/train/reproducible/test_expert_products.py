"""The arithmetic of experts in reproducible mode: what a source gets does not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.every import every
from tidewheel.models.moe.experts import Experts
from tidewheel.train.memory.activations import _selective
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.reproducible.exchange import PartialSum
from tidewheel.train.reproducible.experts import BySource
from tidewheel.train.reproducible.gradient_order import GradientOrder

E, D, SOURCES = 3, 36, 4
WEIGHTS = ("w1", "w3", "w2")
BIASED = {"bias": True, "activation": "clamped"}


def experts(dtype: torch.dtype, inner: int, settings: dict) -> Experts:
    torch.manual_seed(0)
    module = Experts(E, D, inner, **settings).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    module.arithmetic = BySource()
    return module


def partial_sum(*, merges: bool) -> PartialSum:
    """Return a sum over four ranks of one virtual rank each, whose gradients one rank has."""
    order = GradientOrder(SOURCES, MicroBatchShare(0, SOURCES))
    return PartialSum(order, [(rank, 0) for rank in range(SOURCES)], merges=merges)


def groups() -> Iterator[torch.Tensor]:
    """Yield numbers of rows of each (source, expert): products of up to 40 rows, of none, and of 1 to 4."""
    for most in (40, 3):
        yield torch.randint(0, most + 1, (SOURCES, E))


def gradients(arithmetic: BySource, names: list[str]) -> list[list[torch.Tensor]]:
    """Return what was kept: of each parameter, the gradient of each source, or of each node of the sum."""
    return [[torch.stack(values) for _, values in arithmetic.take(name)] for name in names]


CASES = {f"{dtype} {inner}{' biases' if settings else ''}": (dtype, inner, settings)
         for dtype in (torch.float32, torch.bfloat16) for inner in (48, 44, 13) for settings in ({}, BIASED)}


@every(CASES)
def test_a_source_has_the_bits_that_it_has_alone(name: str) -> None:
    """Output, gradient of the rows and gradient of each parameter, wherever its rows are."""
    dtype, inner, settings = CASES[name]
    module = experts(dtype, inner, settings)
    arithmetic: BySource = module.arithmetic  # type: ignore[assignment]
    arithmetic.new_sum = lambda: partial_sum(merges=False)
    names = [name for name, _ in module.named_parameters()]
    for counts in groups():
        rows = torch.randn(int(counts.sum()), D, dtype=dtype, requires_grad=True)
        sent = torch.randn(len(rows), D).to(dtype)
        together = module(rows, counts)
        (to_rows, *_) = torch.autograd.grad(together, [rows, *module.parameters()], sent)
        kept = gradients(arithmetic, names)
        start = 0
        for source in range(SOURCES):
            part = slice(start, start := start + int(counts[source].sum()))
            own = rows[part].detach().clone().requires_grad_()
            alone = module(own, counts[source:source + 1])
            expected = torch.autograd.grad(alone, [own, *module.parameters()], sent[part].clone())
            assert torch.equal(together[part], alone)
            assert torch.equal(to_rows[part], expected[0])
            for of_sources, gradient in zip(kept, expected[1:], strict=True):
                assert torch.equal(of_sources[source], gradient.float())


@every([torch.float32, torch.bfloat16])
def test_the_loop_has_the_bits_of_grouped_products(dtype: torch.dtype) -> None:
    """Other devices compute a grouped product for each source."""
    module = experts(dtype, 48 if dtype == torch.float32 else 40, {})
    module.w1, module.w3, module.w2 = (  # a width that grouped products take in 16 bits
        torch.nn.Parameter(torch.randn(E, *shape).to(dtype) * 0.2) for shape in ((48, 40), (48, 40), (40, 48)))
    for counts in groups():
        counts[0, 0] += 1  # no grouped product is without rows
        rows = torch.randn(int(counts.sum()), 40, dtype=dtype)
        results = []
        for looped in (("cpu",), ()):
            arithmetic = BySource()
            arithmetic.LOOPED = looped  # type: ignore[misc]
            arithmetic.new_sum = lambda: partial_sum(merges=False)
            module.arithmetic = arithmetic
            given = rows.clone().requires_grad_()
            out = module(given, counts)
            out.backward(torch.ones_like(out) * 0.3)
            results.append([out, given.grad, *(value for kept in gradients(arithmetic, [*WEIGHTS]) for value in kept)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def test_gradients_of_sources_are_added_in_the_canonical_order() -> None:
    module = experts(torch.float32, 48, {})
    arithmetic: BySource = module.arithmetic  # type: ignore[assignment]
    counts = torch.tensor([[3, 0, 9], [8, 1, 2], [0, 5, 5], [7, 7, 0]])
    rows, sent = torch.randn(int(counts.sum()), D), torch.randn(int(counts.sum()), D)
    results = []
    for merges in (False, True):
        module.arithmetic = arithmetic = BySource()
        arithmetic.new_sum = lambda merges=merges: partial_sum(merges=merges)
        module(rows, counts).backward(sent)
        results.append(gradients(arithmetic, [*WEIGHTS]))
    for leaves, total in zip(*results, strict=True):
        first, second, third, fourth = leaves
        assert len(total) == 1
        assert torch.equal(total[0], (first + second) + (third + fourth))


def test_selective_checkpointing_computes_the_products_again() -> None:
    """A kept result of a product that is written into a part of a tensor would leave that part unwritten."""
    module = experts(torch.float32, 48, {})
    counts, rows = torch.tensor([[3, 0, 9]]), torch.randn(12, D)
    contexts = partial(_selective, MemoryConfig(activation_checkpointing="selective"), ())
    results = []
    for again in (False, True):
        module.zero_grad()
        given = rows.clone().requires_grad_()
        out = (checkpoint(module, given, counts, use_reentrant=False, context_fn=contexts) if again
               else module(given, counts))
        out.square().sum().backward()
        results.append([out, given.grad, *(parameter.grad for parameter in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_several_sources_without_a_sum_are_a_bug() -> None:
    module = experts(torch.float32, 48, {})
    out = module(torch.randn(6, D), torch.ones(2, E, dtype=torch.int64))
    with pytest.raises(AssertionError, match="nothing reduces"):
        out.sum().backward()
