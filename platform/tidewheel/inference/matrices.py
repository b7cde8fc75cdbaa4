"""Matrix products of few rows, fast and with the bits that training computes among many rows.

Libraries choose a kernel by the shape of a product, and kernels round differently. Training multiplies hundreds of rows
by the transpose of a layer's weight. For a few rows, a CPU is up to twice as fast with weights that lie transposed in
memory, and often has the same bits from two rows on; on another one the same product has other bits. So each way is
tried on random rows before it is used, and the fastest one without a difference is taken. The last one, `EXACT_ROWS`
rows through the layer itself, is what `attention_backends.exact` relies on too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tidewheel.models.attention_backends import EXACT_ROWS

MANY_ROWS = 64
"""Least rows of the product that others are compared with."""
MOST_TRIED = 1 << 26
"""Weights of a matrix for which other ways are tried; larger ones are not worth the memory."""


@dataclass(frozen=True)
class Way:
    """How a product of few rows is computed."""

    rows: int
    """Multiply this many rows; those that are missing are zeros."""
    transposed: bool
    """Multiply by the weights side by side and transposed, not by the layers one after the other."""


class Matrix:
    """The weights of linear layers with one input, for products of few rows.

    Args:
        layers: weight [outputs, inputs] and bias [outputs] of each layer; all have a bias, or none has.
        dtype: of the products.
        exact: whether the bits must be those of a product of many rows.
        fused: whether training computes all layers in one product.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]], dtype: torch.dtype, *, exact: bool,
                 fused: bool = False) -> None:
        self._weights = [weight.detach().to(dtype) for weight, _ in layers]
        biases = [bias.detach().to(dtype) for _, bias in layers if bias is not None]
        self._bias = torch.cat(biases) if biases else None
        if fused and len(layers) > 1:
            self._weights = [torch.cat(self._weights)]
        self._exact = exact
        self._transposed: torch.Tensor | None = None  # the weights of all layers, [inputs, outputs]
        self._ways: dict[int, Way] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all layers side by side, [n, outputs].

        Args:
            x: [n, inputs], in the dtype of the products.
        """
        rows = x.shape[0]
        way = self._ways.get(rows)
        if way is None:
            way = self._ways[rows] = self._way(rows)
        if way.transposed and way.rows == rows and self._bias is None:
            return torch.mm(x, self._wide() if self._transposed is None else self._transposed)
        return self._product(x, way)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all layers side by side, [n, outputs], as training computes them for any n.

        Args:
            x: see `__call__`.
        """
        return self._product(x, Way(max(len(x), EXACT_ROWS if self._exact else 0), False))

    def _product(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        rows = x.shape[0]
        if way.rows > rows:
            x = F.pad(x, (0, 0, 0, way.rows - rows))
        if not way.transposed:
            out = self._apart(x)
        elif self._bias is None:
            out = torch.mm(x, self._wide())
        else:
            out = torch.addmm(self._bias, x, self._wide())
        return out[:rows] if way.rows > rows else out

    def _apart(self, x: torch.Tensor) -> torch.Tensor:
        biases: Sequence[torch.Tensor | None] = [None] * len(self._weights)
        if self._bias is not None:
            biases = self._bias.split([len(weight) for weight in self._weights])
        outputs = [F.linear(x, weight, bias) for weight, bias in zip(self._weights, biases)]
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]

    def _wide(self) -> torch.Tensor:
        if self._transposed is None:
            self._transposed = torch.cat([weight.t() for weight in self._weights], dim=1).contiguous()
        return self._transposed

    def _way(self, rows: int) -> Way:
        """Return the fastest way for a number of rows that has the bits of many rows, if they matter."""
        dtype = self._weights[0].dtype
        if not self._exact:
            return Way(rows, dtype == torch.float32)
        shapes = tuple(weight.shape for weight in self._weights)
        key = (shapes, self._bias is None, dtype, rows, torch.get_num_threads())
        if key not in _WAYS:
            _WAYS[key] = self._tried(rows)
        return _WAYS[key]

    def _tried(self, rows: int) -> Way:
        """Try ways to multiply a number of rows by other weights of the same shapes; return the first that is exact."""
        dtype, sizes = self._weights[0].dtype, [len(weight) for weight in self._weights]
        *ways, last = _candidates(rows, dtype)
        if sum(weight.numel() for weight in self._weights) > MOST_TRIED:
            return last
        count = max(MANY_ROWS, rows)
        x, other = cancelling(count, sum(sizes), self._weights[0].shape[1], dtype)
        bias = None if self._bias is None else torch.linspace(-1, 1, len(self._bias)).to(dtype)
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        tried = Matrix([*zip(other.split(sizes), biases)], dtype, exact=False)
        expected = tried._apart(x)
        for way in ways:
            if all(torch.equal(tried._product(x[begin:begin + rows], way), expected[begin:begin + rows])
                   for begin in range(0, count - rows + 1, rows)):
                return way
        return last


_WAYS: dict[Any, Way] = {}
"""By shape: what products of this process were found to need."""


def _candidates(rows: int, dtype: torch.dtype) -> Iterator[Way]:
    """Yield ways to multiply a number of rows, the fastest first; the last one holds by the contract of `exact`."""
    more = sorted({rows, max(rows, 2), max(rows, EXACT_ROWS)})
    if dtype == torch.float32:
        for count in more:
            yield Way(count, True)
    for count in more:
        yield Way(count, False)


def cancelling(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands whose products sum to 0 but for rounding: x [rows, inputs] and weights [outputs, inputs].

    So nearly every element of x @ weights.T differs if sums are taken in another order, also after it is rounded to 16
    bits, which would hide the order of other sums.

    Args:
        rows: of x.
        outputs: rows of the weights.
        inputs: terms of each sum.
        dtype: of both.
    """
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    order = torch.randperm(half, generator=generator)
    x = torch.randn(rows, half, generator=generator)
    x = (x * 2.0 ** torch.randint(-8, 9, (half,), generator=generator)).to(dtype)  # else sums of 16 bits are exact
    weights = torch.randn(outputs, half, generator=generator).to(dtype)
    odd = (0, inputs % 2)
    return (F.pad(torch.cat((x, x[:, order]), dim=1), odd), F.pad(torch.cat((weights, -weights[:, order]), dim=1), odd))
