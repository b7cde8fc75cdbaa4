"""Sampling of tokens from a model, one at a time, with a cache of keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from tidewheel.models.attention import DocumentMask, document_mask
from tidewheel.models.attention_backends import EXACT_KEYS
from tidewheel.models.decoder import Decoder
from tidewheel.models.documents import Documents

Logits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens, positions, segment ids), each int64 [1, L], to logits [1, L, V]."""


def generate(model: Logits, prompt: Sequence[int], *, tokens: int, context: int, device: torch.device | str = "cpu",
             temperature: float = 0.8, top_k: int = 50, top_p: float = 1.0, seed: int = 0, stop: Collection[int] = (),
             cache: bool = True) -> list[int]:
    """Sample up to `tokens` tokens that continue `prompt`; return them without the prompt.

    Args:
        model: see `stream`, also for the other arguments.
        prompt: at least one token id.
        tokens: maximum number of new tokens.
        context: longest sequence that the model is given.
        device: where the model takes its input.
        temperature: divides the logits.
        top_k: sample from the `top_k` most likely tokens.
        top_p: sample from the most likely tokens of this share.
        seed: of the draws.
        stop: tokens that end the text.
        cache: compute each token once.
    """
    return list(stream(model, prompt, tokens=tokens, context=context, device=device, temperature=temperature,
                       top_k=top_k, top_p=top_p, seed=seed, stop=stop, cache=cache))


@torch.no_grad()
def stream(model: Logits, prompt: Sequence[int], *, tokens: int, context: int, device: torch.device | str = "cpu",
           temperature: float = 0.8, top_k: int = 50, top_p: float = 1.0, seed: int = 0, stop: Collection[int] = (),
           cache: bool = True) -> Iterator[int]:
    """Yield up to `tokens` tokens that continue `prompt`, each as soon as it is sampled.

    If the model is sharded, all its ranks must call this together. The draws come from a CPU generator, so every rank
    draws the same tokens.

    Args:
        model: a `Decoder`, or any function that returns logits.
        prompt: at least one token id.
        tokens: maximum number of new tokens.
        context: longest sequence that the model is given; earlier tokens are cut off.
        device: where the model takes its input.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the `top_k` most likely tokens; 0: from all.
        top_p: sample from the fewest tokens whose probabilities sum to at least this
            (https://arxiv.org/abs/1904.09751).
        seed: of the draws.
        stop: tokens that end the text; the one that does is yielded too.
        cache: compute each token once, while the context has room. False computes the whole context for each token.
            Only a `Decoder` can use the cache; any other function always gets the whole context.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    with contextlib.ExitStack() as eager, contextlib.ExitStack() as caching:
        kept: Cache | None = None
        eager.enter_context(torch.compiler.set_stance("force_eager"))  # every length would be compiled again
        if cache and isinstance(model, Decoder) and "mask" not in vars(model):  # context parallelism has no whole keys
            kept = caching.enter_context(cached(model, min(context, len(ids[-context:]) + tokens)))
        for _ in range(tokens):
            if kept is not None and len(ids) > context:  # a token that is cut off changes the keys of all later ones
                caching.close()
                kept = None
            begin = kept.length if kept is not None else 0
            window = torch.tensor([ids[begin:] if kept is not None else ids[-context:]], device=device)
            positions = torch.arange(begin, begin + window.shape[1], device=device)[None]
            logits = model(window, positions, torch.zeros_like(window))[0, -1].float().cpu()
            ids.append(draw(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p))
            yield ids[-1]
            if ids[-1] in stop:
                break


def draw(logits: torch.Tensor, generator: torch.Generator, *, temperature: float = 1.0, top_k: int = 0,
         top_p: float = 1.0) -> int:
    """Return one token, sampled from logits.

    Args:
        logits: float [V] on the CPU.
        generator: source of randomness.
        temperature: see `generate`.
        top_k: see `generate`.
        top_p: see `generate`.
    """
    if temperature == 0:
        return int(logits.argmax())
    values, indices = logits.topk(min(top_k or len(logits), len(logits)))
    probabilities = torch.softmax(values / temperature, dim=0)
    if top_p < 1:
        likelier = probabilities.cumsum(0) - probabilities  # sum over the tokens before; the first always stays
        probabilities = probabilities * (likelier < top_p)
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])


class Cache:
    """Keys and values of the tokens that a decoder has seen, [B, K, capacity, E] for each layer; see `cached`.

    Exact attention takes a multiple of `EXACT_KEYS` keys. It gets them from here, those without a token hidden by the
    mask, so that it copies none to fill them up.

    Args:
        capacity: most tokens of a row.
        kernel: of the attention, "masked" or "exact".
    """

    def __init__(self, capacity: int, kernel: str = "masked") -> None:
        self._kernel = kernel
        self.capacity = self._filled(capacity)
        self._layers: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: dict[nn.Module, int] = {}

    @property
    def length(self) -> int:
        """Return the number of tokens that all layers have seen."""
        return min(self._lengths.values(), default=0)

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None,
             window: int | None = None) -> DocumentMask:
        """Return the mask of new tokens, which follow those seen. Replaces `Decoder.mask`.

        Args:
            segment_ids: [B, L] of the new tokens, all 0.
            x: input of the first block [B, L, D].
            documents: not used: a text is one document.
            window: of a sliding window.
        """
        begin = self.length
        indices = torch.arange(self._filled(begin + x.shape[1]), device=x.device)
        seen = torch.zeros(1, len(indices), dtype=segment_ids.dtype, device=x.device)
        return document_mask(segment_ids, self._kernel, window=window, places=indices[begin:begin + x.shape[1]],
                             key_segments=seen, key_places=indices, keys=self._extend)

    def cut(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        self._lengths = {layer: min(length, known) for layer, known in self._lengths.items()}

    def repeat(self, rows: int) -> None:
        """Give each of `rows` rows the tokens of the only row so far."""
        self._layers = {layer: (keys.repeat(rows, 1, 1, 1), values.repeat(rows, 1, 1, 1))
                        for layer, (keys, values) in self._layers.items()}

    def select(self, rows: torch.Tensor) -> None:
        """Continue with some of the rows, int64 indices."""
        self._layers = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._layers.items()}

    def _extend(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of a layer; return all of them, and for exact attention room behind them."""
        if layer not in self._layers:
            self._layers[layer] = (k.new_zeros(*k.shape[:2], self.capacity, k.shape[3]),
                                   v.new_zeros(*v.shape[:2], self.capacity, v.shape[3]))
        keys, values = self._layers[layer]
        begin = self._lengths.get(layer, 0)
        end = begin + k.shape[2]
        keys[:, :, begin:end] = k
        values[:, :, begin:end] = v
        self._lengths[layer] = end
        shown = self._filled(end)
        return keys[:, :, :shown], values[:, :, :shown]

    def _filled(self, length: int) -> int:
        """Return the number of keys that attention takes for a number of tokens."""
        return -(-length // EXACT_KEYS) * EXACT_KEYS if self._kernel == "exact" else length


@contextlib.contextmanager
def cached(model: Decoder, capacity: int) -> Iterator[Cache]:
    """Cache keys and values inside the block: each call of `model` continues the calls before it.

    Calls take [B, L] tokens of one document a row.

    Args:
        model: a whole decoder.
        capacity: maximum number of tokens over all calls.
    """
    kept = Cache(capacity, "exact" if model.config.attention == "exact" else "masked")
    model.mask = kept.mask  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        del model.mask  # restores the method of the class
