"""Sample several answers to one prompt together: the prompt is computed once, and each answer is a function of its key.

A token is drawn with a number that depends on (key, stream, sample, turn, position in the turn) alone
(`inference.draws`). With exact attention (`model.attention: exact`) its logits depend on nothing but the weights and
the tokens before it: every product has at least `EXACT_ROWS` rows. So a sample is the same in a group of any size and
order, and after any number of kills; and its log-probabilities have the bits that training computes for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from tidewheel.inference.conversation import Conversation, Partner
from tidewheel.inference.draws import uniforms
from tidewheel.inference.generate import Cache, cached
from tidewheel.inference.prefill import prefill
from tidewheel.models.attention_backends import EXACT_ROWS
from tidewheel.models.decoder import Decoder
from tidewheel.train.precision import Precision, fp32_products, precision_context


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled.

    Args:
        tokens: most tokens of an answer, with those that a partner writes.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from this many most likely tokens; 0: from all.
        top_p: sample from the fewest tokens whose probabilities sum to at least this.
        stop: tokens that end an answer, or a turn of it, as the last token.
        precision: of the matrix products.
    """

    tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: frozenset[int] = frozenset()
    precision: Precision = "fp32"


@dataclass(frozen=True)
class Answer:
    """A sampled answer."""

    tokens: list[int]
    log_probabilities: list[float]
    """Of each token, in nats: under the logits divided by the temperature, over the whole vocabulary. 0 if written."""
    stopped: bool
    """Whether a stop token or the partner ended it; else it was cut off."""
    written: frozenset[int] = field(default=frozenset())
    """Indices of the tokens that a partner wrote."""
    begin: int = 0
    """Index of the first token of the last turn."""

    @property
    def learnt(self) -> list[int]:
        """Return 1 for each token that was sampled, 0 for each that was written."""
        return [int(index not in self.written) for index in range(len(self.tokens))]


@torch.no_grad()
def sample_group(model: Decoder, prompt: Sequence[int], samples: Sequence[int], sampling: Sampling, *, key: int,
                 stream: int, partner: Partner | None = None) -> list[Answer]:
    """Return an answer to the prompt for each sample.

    Args:
        model: a whole decoder.
        prompt: at least one token id; with the answer at most the model's `max_sequence_length`.
        samples: index of each sample in its group; they need not begin at 0.
        sampling: how to sample.
        key: see `draws.uniforms`.
        stream: see `draws.uniforms`.
        partner: writes what follows each turn of an answer; its errors pass through.

    Raises:
        ValueError: the prompt is empty, or leaves no room for an answer.
    """
    room = model.config.max_sequence_length - len(prompt)
    if not prompt or room < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens in a context of {model.config.max_sequence_length}")
    device = next(model.parameters()).device
    most = min(sampling.tokens, room)
    with torch.compiler.set_stance("force_eager"), precision_context(device, sampling.precision), \
            fp32_products(device, False), weights_converted_once(model), \
            cached(model, max(len(prompt) + most, EXACT_ROWS)) as cache:
        talks = [Conversation(index, sampling.stop, most, partner) for index in range(len(samples))]
        group = _Group(model, cache, prompt, samples, sampling, key, stream, talks)
        while group.step():
            pass
    return [Answer(talk.tokens, talk.values, talk.stopped, frozenset(talk.written), talk.begin) for talk in talks]


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


class _Group:
    """A group that is being sampled: rows of one batch, all at the same position.

    Args:
        model: a whole decoder, whose keys `cache` keeps.
        cache: empty.
        prompt: see `sample_group`, also for the next four.
        samples: indices.
        sampling: how to sample.
        key: of the numbers.
        stream: of the numbers.
        talks: the answers, one for each sample.
    """

    def __init__(self, model: Decoder, cache: Cache, prompt: Sequence[int], samples: Sequence[int],
                 sampling: Sampling, key: int, stream: int, talks: Sequence[Conversation]) -> None:
        self._model, self._cache, self._samples, self._sampling = model, cache, list(samples), sampling
        self._key, self._stream, self._device = key, stream, next(model.parameters()).device
        self._position = len(prompt)
        self._talks = talks
        self._rows = list(range(len(samples)))  # the answer of each row of the batch; rows beyond them are padding
        self._logits = self._prefilled(prompt)

    def step(self) -> bool:
        """Append a token to each answer that goes on, or several if its partner writes to all of them.

        Returns:
            Whether any goes on behind it.
        """
        self._append()
        if all(self._talks[answer].over for answer in self._rows):
            return False
        self._drop_ended()
        going = [self._talks[answer] for answer in self._rows if not self._talks[answer].over]
        written = min(talk.num_written for talk in going)
        for talk in going:
            for _ in range(written):
                talk.write()
        self._logits = self._decoded([self._talks[answer].tokens[-1 - written:] for answer in self._rows])
        return True

    def _prefilled(self, prompt: Sequence[int]) -> torch.Tensor:
        """Compute the prompt once, for all rows; return the logits behind it, fp32 [rows, V]."""
        missing = max(0, EXACT_ROWS - len(prompt))
        tokens = torch.tensor([[*prompt, *[prompt[-1]] * missing]], device=self._device)
        positions = torch.arange(tokens.shape[1], device=self._device)[None]
        if missing:
            logits = self._model(tokens, positions, torch.zeros_like(tokens))[:, len(prompt) - 1].float()
        else:
            logits = prefill(self._model, tokens, 0)
        self._cache.cut(len(prompt))
        self._cache.repeat(self._padded(len(self._rows)))
        return logits.expand(len(self._rows), -1)

    def _decoded(self, tokens: list[list[int]]) -> torch.Tensor:
        """Compute tokens for each row, as many for all; return the logits behind them, fp32 [rows, V]."""
        missing = self._padded(len(tokens)) - len(tokens)
        length = max(map(len, tokens))
        known = [[*[row[-1]] * (length - len(row)), *row] for row in tokens]  # an ended answer may have fewer
        batch = torch.tensor([*known, *[known[0]] * missing], device=self._device)
        begin, self._position = self._position, self._position + length
        return prefill(self._model, batch, begin)[:len(tokens)]

    def _padded(self, rows: int) -> int:
        return max(rows, EXACT_ROWS) if self._model.config.attention == "exact" else rows

    def _append(self) -> None:
        """Append a token to the answer of each row that goes on: the partner's next one, or one that is drawn."""
        going = [row for row, answer in enumerate(self._rows) if not self._talks[answer].over]
        written = [row for row in going if self._talks[self._rows[row]].next_written is not None]
        asked = [row for row in going if row not in written]
        for row in written:
            self._talks[self._rows[row]].write()
        if not asked:
            return
        ids = [self._samples[self._rows[row]] for row in asked]
        numbers = uniforms(self._key, self._stream, ids, [self._talks[self._rows[row]].place for row in asked])
        tokens, values = choose(self._logits[asked], numbers, self._sampling)
        for row, token, value in zip(asked, tokens, values):
            self._talks[self._rows[row]].add(token, value)

    def _drop_ended(self) -> None:
        """Leave out ended answers once they are half of the rows."""
        going = [row for row, answer in enumerate(self._rows) if not self._talks[answer].over]
        if len(going) > len(self._rows) // 2 or self._padded(len(going)) == self._padded(len(self._rows)):
            return
        rows = going + [going[0]] * (self._padded(len(going)) - len(going))
        self._cache.select(torch.tensor(rows, device=self._device))
        self._rows = [self._rows[row] for row in going]


def choose(logits: torch.Tensor, numbers: np.ndarray, sampling: Sampling) -> tuple[list[int], list[float]]:
    """Return a token for each row, and its log-probability.

    The token is where the cumulative distribution passes the row's number. Sums are fp64 in the order of the
    vocabulary, so that one number gives one token.

    Args:
        logits: fp32 [n, V].
        numbers: fp64 [n] in (0, 1).
        sampling: temperature, top_k and top_p.
    """
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    every = logits.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        weights = every.double().exp().cpu().numpy()
        _restrict(weights, sampling.top_k, sampling.top_p)
        sums = np.cumsum(weights, axis=-1)
        found = (sums <= (numbers * sums[:, -1])[:, None]).sum(axis=-1)
        tokens = torch.from_numpy(found).to(logits.device)
    values = every.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), values.tolist()


def _restrict(weights: np.ndarray, top_k: int, top_p: float) -> None:
    """Set the weights of tokens that may not be drawn to 0, [n, V] in place."""
    if (not top_k or top_k >= weights.shape[1]) and top_p >= 1:
        return
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    leave_out = np.zeros(weights.shape, dtype=bool)
    if top_k:
        leave_out[:, top_k:] = True
    if top_p < 1:
        likelier = np.cumsum(ranked, axis=-1) - ranked  # sum over the tokens before; the first always stays
        leave_out |= likelier >= top_p * ranked.sum(axis=-1, keepdims=True)
    np.put_along_axis(weights, order, np.where(leave_out, 0.0, ranked), axis=-1)
