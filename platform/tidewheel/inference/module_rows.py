"""Decode the rows of a group with the modules of a model: for all that `inference.decoding` does not compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tidewheel.inference.generate import Cache, cached
from tidewheel.inference.prefill import prefill
from tidewheel.models.attention_backends import EXACT_ROWS
from tidewheel.models.decoder import Decoder
from tidewheel.train.precision import Precision, fp32_products, precision_context


@contextlib.contextmanager
def module_rows(model: Decoder, prompt: Sequence[int], rows: int, capacity: int,
                precision: Precision) -> Iterator[ModuleRows]:
    """Compute a prompt once; inside the block its rows go on.

    Args:
        model: a whole decoder.
        prompt: token ids, at least one.
        rows: number of rows.
        capacity: most tokens of a row, with the prompt.
        precision: of the products.
    """
    device = next(model.parameters()).device
    with torch.compiler.set_stance("force_eager"), precision_context(device, precision), \
            fp32_products(device, False), weights_converted_once(model), \
            cached(model, max(capacity, EXACT_ROWS)) as cache:
        yield ModuleRows(model, cache, prompt, rows)


@contextlib.contextmanager
def weights_converted_once(model: nn.Module) -> Iterator[None]:
    """Let autocast keep 16-bit weights until its context ends, also those of a model without gradients.

    Autocast keeps what it converts from leaves that require gradients, and converts other weights for every product.
    """
    frozen = [parameter for parameter in model.parameters()
              if parameter.is_floating_point() and not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class ModuleRows:
    """The rows of a group, all at one position. With exact attention every product has at least `EXACT_ROWS` rows.

    Args:
        model: a whole decoder, whose keys `cache` keeps.
        cache: empty.
        prompt: token ids.
        rows: number of rows.
    """

    def __init__(self, model: Decoder, cache: Cache, prompt: Sequence[int], rows: int) -> None:
        self._model, self._cache, self._position = model, cache, len(prompt)
        device = next(model.parameters()).device
        missing = max(0, EXACT_ROWS - len(prompt))
        tokens = torch.tensor([[*prompt, *[prompt[-1]] * missing]], device=device)
        if missing:
            positions = torch.arange(tokens.shape[1], device=device)[None]
            logits = model(tokens, positions, torch.zeros_like(tokens))[:, len(prompt) - 1].float()
        else:
            logits = prefill(model, tokens, 0)
        cache.cut(len(prompt))
        self._count = self._padded(rows)  # rows of the cache; those that are missing stand behind the others
        cache.repeat(self._count)
        self.logits = logits.expand(rows, -1)
        """Logits behind the newest token of each row, fp32 [n, V]."""

    def step(self, tokens: torch.Tensor) -> None:
        """Compute more tokens of each row, as many for all.

        Args:
            tokens: int64 [n, L].
        """
        batch = torch.cat((tokens, tokens[:1].expand(self._count - len(tokens), -1)))
        begin, self._position = self._position, self._position + tokens.shape[1]
        self.logits = prefill(self._model, batch, begin)[:len(tokens)]

    def select(self, rows: torch.Tensor) -> None:
        """Continue with some of the rows, int64 indices."""
        self._count = self._padded(len(rows))
        self._cache.select(torch.cat((rows, rows[:1].expand(self._count - len(rows)))))

    def _padded(self, rows: int) -> int:
        return max(rows, EXACT_ROWS) if self._model.config.attention == "exact" else rows
