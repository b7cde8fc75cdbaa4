"""What a model says of the tokens of a sampled group: log-probabilities under a reference model, or values.

One pass computes a group, whose shape follows from the group alone: so the figures do too, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tidewheel.inference.group import Sampling
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.train.objective import Outputs
from tidewheel.train.precision import fp32_products, precision_context
from tidewheel.train.preferences.log_probabilities import token_log_probabilities

CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at once."""
Rows = list[list[float]]
"""A value for each token of each answer."""


def log_probabilities(model: Decoder, prompt: Sequence[int], answers: Sequence[Sequence[int]],
                      sampling: Sampling) -> Rows:
    """Return log p of the tokens of each answer, in nats: under the logits divided by the temperature.

    Args:
        model: a whole decoder.
        prompt: that the answers share.
        answers: tokens of each answer, at least one.
        sampling: temperature and precision.
    """
    def of(tokens: torch.Tensor, segments: torch.Tensor) -> Callable[..., torch.Tensor]:
        targets = next_tokens(tokens, segments)

        def objective(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor],
                      *_: torch.Tensor) -> torch.Tensor:
            outputs = Outputs(hidden, lambda x: make_logits(x).float() / sampling.temperature)
            return token_log_probabilities(outputs, targets, CHUNK_TOKENS)

        return objective

    return _computed(model, prompt, answers, sampling, of)


def values(model: Decoder, prompt: Sequence[int], answers: Sequence[Sequence[int]], sampling: Sampling) -> Rows:
    """Return the value before each token of each answer.

    Args:
        model: a whole decoder with a value head.
        prompt: see `log_probabilities`.
        answers: see `log_probabilities`.
        sampling: its precision counts.
    """
    return _computed(model, prompt, answers, sampling,
                     lambda tokens, segments: lambda hidden, make_logits, values: values)


@torch.no_grad()
def _computed(model: Decoder, prompt: Sequence[int], answers: Sequence[Sequence[int]], sampling: Sampling,
              of: Callable[[torch.Tensor, torch.Tensor], Callable[..., torch.Tensor]]) -> Rows:
    """Return what `of` computes at the position before each token of each answer."""
    device: Any = next(model.parameters()).device
    width = len(prompt) + max(len(answer) for answer in answers)
    tokens = torch.zeros(len(answers), width, dtype=torch.int64)
    segments = torch.full_like(tokens, -1)
    for row, answer in enumerate(answers):
        size = len(prompt) + len(answer)
        tokens[row, :size] = torch.tensor([*prompt, *answer])
        segments[row, :size] = 0
    positions = torch.arange(width).expand_as(tokens).masked_fill(segments < 0, 0)
    tokens, positions, segments = tokens.to(device), positions.to(device), segments.to(device)
    with torch.compiler.set_stance("force_eager"), precision_context(device, sampling.precision), \
            fp32_products(device, False):
        found = model(tokens, positions, segments, objective=of(tokens, segments)).float().cpu()
    first = len(prompt) - 1
    return [found[row, first:first + len(answer)].tolist() for row, answer in enumerate(answers)]
