"""Text from a model, one token at a time, with the keys and values of what came before kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from tidewheel.models.attention import DocumentMask, document_mask
from tidewheel.models.decoder import Decoder

Logits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens, positions, segment ids), each [1, L], to logits [1, L, V]."""


@torch.no_grad()
def generate(model: Logits, prompt: Sequence[int], *, tokens: int, context: int, device: torch.device | str = "cpu",
             temperature: float = 0.8, top_k: int = 50, top_p: float = 1.0, seed: int = 0, stop: int | None = None,
             cache: bool = True) -> list[int]:
    """Continue `prompt` by up to `tokens` tokens.

    Where the model is sharded all its ranks must call it together; the draws come from a CPU generator, so that every
    rank draws the same.

    Args:
        model: a `Decoder`, or any function that gives logits.
        prompt: at least one token id.
        context: longest sequence the model is given; earlier tokens fall off.
        device: where the model takes its input.
        temperature: 0 takes the likeliest token.
        top_k: draw among the likeliest k; 0: among all.
        top_p: draw among the fewest tokens whose probabilities reach this sum (https://arxiv.org/abs/1904.09751).
        stop: end after this token.
        cache: compute each token once, while the context has room; False computes the whole context for each token.
            Takes a `Decoder`; another function always gets the whole context.

    Returns:
        The new tokens, without the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, new = list(prompt), []
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as drop:
        kept: Cache | None = None
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # each length would be compiled anew
        if cache and isinstance(model, Decoder) and "mask" not in vars(model):  # context parallel keeps no whole keys
            kept = drop.enter_context(cached(model, min(context, len(ids[-context:]) + tokens)))
        for _ in range(tokens):
            if kept is not None and len(ids) > context:  # what falls off changes all that follows: nothing to keep
                drop.close()
                kept = None
            window = torch.tensor([ids[kept.length:] if kept is not None else ids[-context:]], device=device)
            begin = kept.length if kept is not None else 0
            positions = torch.arange(begin, begin + window.shape[1], device=device)[None]
            logits = model(window, positions, torch.zeros_like(window))[0, -1].float().cpu()
            ids.append(draw(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p))
            new.append(ids[-1])
            if new[-1] == stop:
                break
    return new


def draw(logits: torch.Tensor, generator: torch.Generator, *, temperature: float = 1.0, top_k: int = 0,
         top_p: float = 1.0) -> int:
    """One token from logits [V], see `generate`."""
    if temperature == 0:
        return int(logits.argmax())
    values, indices = logits.topk(min(top_k or len(logits), len(logits)))
    probabilities = torch.softmax(values / temperature, dim=0)
    if top_p < 1:
        before = probabilities.cumsum(0) - probabilities  # of all likelier ones; the likeliest always stays
        probabilities = probabilities * (before < top_p)
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])


class Cache:
    """Keys and values of the tokens a decoder has seen, [1, K, capacity, E] for each layer; see `cached`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        """Tokens seen."""
        self._layers: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor) -> DocumentMask:
        """In place of `Decoder.mask`: the tokens given follow those seen."""
        begin, self.length = self.length, self.length + x.shape[1]
        places = torch.arange(self.length, device=x.device)
        seen = torch.zeros(1, self.length, dtype=segment_ids.dtype, device=x.device)
        return document_mask(segment_ids, "masked", places=places[begin:], key_segments=seen, key_places=places,
                             keys=self._extend)

    def _extend(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._layers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._layers[layer] = k.new_empty(shape), v.new_empty(shape)
        keys, values = self._layers[layer]
        new = slice(self.length - k.shape[2], self.length)
        keys[:, :, new], values[:, :, new] = k, v
        return keys[:, :, :self.length], values[:, :, :self.length]


@contextlib.contextmanager
def cached(model: Decoder, capacity: int) -> Iterator[Cache]:
    """While it lasts, each call of `model` with [1, L] tokens of one document continues the calls before it.

    Args:
        capacity: most tokens over all calls.
    """
    kept = Cache(capacity)
    model.mask = kept.mask  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        del model.mask  # the class's own again
