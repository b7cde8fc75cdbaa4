"""Sample several answers to one prompt together: the prompt is computed once, and each answer is a function of its key.

A token is drawn with a number that depends on (key, stream, sample, turn, position in the turn) alone
(`inference.draws`). With exact attention (`model.attention: exact`) its logits depend on nothing but the weights and
the tokens before it: products are computed in ways that have the same bits among any number of rows. So a sample is the
same in a group of any size and order, and after any number of kills; and its log-probabilities have the bits that
training computes for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tidewheel.inference import prefill
from tidewheel.inference.conversation import Conversation, Partner
from tidewheel.inference.decoding import Rows, prepared
from tidewheel.inference.draws import Numbers
from tidewheel.inference.module_rows import module_rows
from tidewheel.models.decoder import Decoder
from tidewheel.train.precision import Precision


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


@torch.inference_mode()
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
    if partner is None:
        [answers] = sample_groups(model, [prompt], samples, sampling, key=key, streams=[stream])
        return answers
    most = _most(model, prompt, sampling)
    talks = [Conversation(index, sampling.stop, most, partner) for index in range(len(samples))]
    numbers = Numbers(key, [stream] * len(samples), samples, together=False)
    _sample(model, [prompt], sampling, numbers, talks)
    return [_answer(talk) for talk in talks]


@torch.inference_mode()
def sample_groups(model: Decoder, prompts: Sequence[Sequence[int]], samples: Sequence[int], sampling: Sampling, *,
                  key: int, streams: Sequence[int]) -> list[list[Answer]]:
    """Return an answer to each prompt for each sample.

    All groups are decoded together if the prompts have one length. With exact attention, answers are those of
    `sample_group`; with another, their last bits depend on the number of groups.

    Args:
        model: see `sample_group`.
        prompts: one or more of the same length.
        samples: index of each sample in its group.
        sampling: how to sample.
        key: see `draws.uniforms`.
        streams: of each prompt.

    Raises:
        ValueError: see `sample_group`; or the lengths of the prompts differ.
    """
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError("prompts that are decoded together must have the same length")
    most, count = _most(model, prompts[0], sampling), len(samples)
    talks = [Conversation(0, sampling.stop, most, None) for _ in range(len(prompts) * count)]
    numbers = Numbers(key, [stream for stream in streams for _ in samples], list(samples) * len(prompts), together=True)
    _sample(model, prompts, sampling, numbers, talks)
    return [[_answer(talk) for talk in talks[begin:begin + count]] for begin in range(0, len(talks), count)]


def _answer(talk: Conversation) -> Answer:
    return Answer(talk.tokens, talk.values, talk.stopped, frozenset(talk.written), talk.begin)


def _most(model: Decoder, prompt: Sequence[int], sampling: Sampling) -> int:
    """Return the most tokens of an answer to a prompt."""
    room = model.config.max_sequence_length - len(prompt)
    if not prompt or room < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens in a context of {model.config.max_sequence_length}")
    return min(sampling.tokens, room)


def _sample(model: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling, numbers: Numbers,
            talks: Sequence[Conversation]) -> None:
    """Sample all answers, which are as many for each prompt."""
    device, capacity = next(model.parameters()).device, len(prompts[0]) + talks[0].most
    count = len(talks) // len(prompts)
    # the modules compute long prompts in chunks
    weights = prepared(model, sampling.precision) if sum(map(len, prompts)) <= prefill.CHUNK_TOKENS else None
    if weights is not None:
        _Group(Rows(weights, prompts, count, capacity), sampling, numbers, talks, device).sample()
        return
    for begin, prompt in zip(range(0, len(talks), count), prompts):
        with module_rows(model, prompt, count, capacity, sampling.precision) as rows:
            _Group(rows, sampling, numbers.part(begin, count), talks[begin:begin + count], device).sample()


class Batch(Protocol):
    """Rows of a batch, all at one position, whose tokens a model computes: `Rows` or `ModuleRows`."""

    logits: torch.Tensor
    """Logits behind the newest token of each row, fp32 [n, V]."""

    def step(self, tokens: torch.Tensor) -> None:
        """Compute more tokens of each row, int64 [n, L]."""
        ...

    def select(self, rows: torch.Tensor) -> None:
        """Continue with some of the rows, int64 indices."""
        ...


class _Group:
    """A group that is being sampled.

    Args:
        batch: a row for each answer, behind the prompt.
        sampling: how to sample.
        numbers: decide on the tokens.
        talks: the answers.
        device: of the batch.
    """

    def __init__(self, batch: Batch, sampling: Sampling, numbers: Numbers, talks: Sequence[Conversation],
                 device: torch.device) -> None:
        self._batch, self._sampling, self._numbers, self._talks = batch, sampling, numbers, talks
        self._device = device
        self._rows = list(range(len(talks)))  # the answer of each row of the batch

    def sample(self) -> None:
        """Append tokens to the answers until they are over."""
        while True:
            self._append()
            going = [row for row, answer in enumerate(self._rows) if not self._talks[answer].over]
            if not going:
                return
            if len(going) <= len(self._rows) // 2:  # leave out ended answers
                self._batch.select(torch.tensor(going, device=self._device))
                self._rows = [self._rows[row] for row in going]
            self._batch.step(torch.tensor(self._newest(), device=self._device))

    def _newest(self) -> list[list[int]]:
        """Return the tokens that each row computes next: the newest, and what partners write to all behind it."""
        going = [self._talks[answer] for answer in self._rows if not self._talks[answer].over]
        written = min(talk.num_written for talk in going)
        for talk in going:
            for _ in range(written):
                talk.write()
        tokens = []
        for answer in self._rows:
            row = self._talks[answer].tokens[-1 - written:]
            tokens.append([*[row[-1]] * (1 + written - len(row)), *row])  # an ended answer may have fewer
        return tokens

    def _append(self) -> None:
        """Append a token to the answer of each row that goes on: the partner's next one, or one that is drawn."""
        asked = []
        for row, answer in enumerate(self._rows):
            talk = self._talks[answer]
            if talk.over:
                continue
            if talk.next_written is None:
                asked.append(row)
            else:
                talk.write()
        if not asked:
            return
        answers = [self._rows[row] for row in asked]
        numbers = self._numbers.of(answers, [self._talks[answer].place for answer in answers])
        logits = self._batch.logits if len(asked) == len(self._rows) else self._batch.logits[asked]
        for answer, token, value in zip(answers, *choose(logits, numbers, self._sampling)):
            self._talks[answer].add(token, value)


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
        limits = numbers * sums[:, -1]
        found = [row.searchsorted(limit, side="right") for row, limit in zip(sums, limits)]
        tokens = torch.tensor(found, device=logits.device)
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
