"""Generation for several prompts at once, with a cache of keys and values.

Prompts are padded on the left, so that all rows write the same column next. Each row has draws of its own, and ends by
itself, so a row's text depends on the others only by the rounding of products of other shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from tidewheel.inference.generate import Cache, draw
from tidewheel.inference.tasks.requests import Generate
from tidewheel.models.attention import DocumentMask, document_mask
from tidewheel.models.decoder import Decoder
from tidewheel.models.documents import Documents
from tidewheel.shards.tokenizer import Encoder

PADDING = -1


class RowCache(Cache):
    """Keys and values of several rows, [B, K, capacity, E] for each layer.

    Args:
        capacity: maximum number of columns.
        segments: int64 [B, columns so far]: 0 for tokens, -1 for padding.
    """

    def __init__(self, capacity: int, segments: torch.Tensor) -> None:
        super().__init__(capacity)
        self.segments = segments

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None,
             window: int | None = None) -> DocumentMask:
        """Return the mask of new columns, which follow those seen. Replaces `Decoder.mask`."""
        begin = self.length
        indices = torch.arange(begin + x.shape[1], device=x.device)
        return document_mask(segment_ids, "masked", window=window, places=indices[begin:],
                             key_segments=self.segments[:, :len(indices)], key_places=indices, keys=self._extend)


@contextlib.contextmanager
def rows_cached(model: Decoder, cache: RowCache) -> Iterator[None]:
    """Cache keys and values of several rows inside the block: each call of `model` continues the calls before it."""
    model.mask = cache.mask  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.mask  # restores the method of the class


@torch.no_grad()
def write(model: Decoder, tokenizer: Encoder, prompts: Sequence[Sequence[int]], requests: Sequence[Generate],
          ends: Collection[int], device: torch.device) -> list[str]:
    """Return the texts that continue some prompts.

    Args:
        model: a whole decoder.
        tokenizer: decodes the new tokens.
        prompts: at least one token each; they leave room for the new tokens in the context.
        requests: one for each prompt.
        ends: tokens that end a text.
        device: where the model takes its input.
    """
    longest = max(len(prompt) for prompt in prompts)
    most = max(request.tokens for request in requests)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    columns = torch.arange(longest + most, device=device)
    segments = torch.where(columns >= padding[:, None], 0, PADDING)
    positions = (columns - padding[:, None]).clamp(min=0)
    window = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    generators = [torch.Generator().manual_seed(request.seed) for request in requests]
    new: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    cache = RowCache(longest + most, segments)
    with torch.compiler.set_stance("force_eager"), rows_cached(model, cache):
        begin = 0
        while open_rows:
            end = begin + window.shape[1]
            logits = model(window, positions[:, begin:end], segments[:, begin:end],
                           None, lambda hidden, output: output(hidden[:, -1:]))[:, 0].float().cpu()
            column = torch.zeros(len(prompts), 1, dtype=torch.int64)
            for row in sorted(open_rows):
                request = requests[row]
                token = draw(logits[row], generators[row], temperature=request.temperature, top_k=request.top_k,
                             top_p=request.top_p)
                column[row] = token
                new[row].append(token)
                if token in ends or len(new[row]) == request.tokens or _stopped(tokenizer, new[row], request.stops):
                    open_rows.discard(row)
            begin, window = end, column.to(device)
    return [cut(_text(tokenizer, tokens, ends), request.stops) for tokens, request in zip(new, requests)]


def _stopped(tokenizer: Encoder, tokens: Sequence[int], stops: Sequence[str]) -> bool:
    """Return whether the text so far holds one of the strings that end it."""
    if not stops:
        return False
    text = tokenizer.decode(tokens)
    return any(stop in text for stop in stops)


def _text(tokenizer: Encoder, tokens: Sequence[int], ends: Collection[int]) -> str:
    kept = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    return tokenizer.decode(kept)


def cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the strings that end it."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
