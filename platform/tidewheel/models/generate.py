"""Text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Model(Protocol):
    """A decoder, or one that is spread over ranks."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        """[B, L, V] logits."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """To know the device."""


@torch.no_grad()
def generate(model: Model, prompt: Sequence[int], *, tokens: int, context: int, temperature: float = 0.8,
             top_k: int = 50, seed: int = 0, stop: int | None = None) -> list[int]:
    """Continue `prompt` by up to `tokens` tokens.

    The whole context is computed anew for each token, which is fine for a sample of a few hundred. Under FSDP all
    ranks must call it together; the draws come from a CPU generator, so that every rank draws the same.

    Args:
        prompt: at least one token id.
        context: longest sequence the model is given; earlier tokens fall off.
        temperature: 0 takes the likeliest token.
        top_k: draw among the likeliest k; 0: among all.
        stop: end after this token.

    Returns:
        The new tokens, without the prompt.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids, new = list(prompt), []
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        positions = torch.arange(window.shape[1], device=device)[None]
        logits = model(window, positions, torch.zeros_like(window))[0, -1].float().cpu()
        if temperature == 0:
            choice = int(logits.argmax())
        else:
            values, indices = logits.topk(min(top_k or len(logits), len(logits)))
            probabilities = torch.softmax(values / temperature, dim=0)
            choice = int(indices[torch.multinomial(probabilities, 1, generator=generator)])
        ids.append(choice)
        new.append(choice)
        if choice == stop:
            break
    return new
