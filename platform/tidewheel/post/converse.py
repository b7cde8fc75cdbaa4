"""Sample a group's answers with an engine that completes sequences: `inference.group.sample_group` for any engine.

Between completions the partner of an answer takes its turns. A partner may end a turn at any token, so with one the
engine is asked for some tokens at a time; those behind the end of a turn are thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tidewheel.engines.serving.base import Completion, Prefix, RunningEngine
from tidewheel.errors import RolloutError
from tidewheel.inference.conversation import Conversation, Partner
from tidewheel.inference.group import Answer, Sampling
from tidewheel.shards.order import hash64

CHUNK_TOKENS = 64
"""Most tokens that a completion of an answer with a partner has."""
FIX = "this is a mistake of the engine: compare its versions with those that Tidewheel's documentation names"


def converse(engine: RunningEngine, prompt: Sequence[int], samples: Sequence[int], sampling: Sampling, *, key: int,
             stream: int, room: int, vocabulary_size: int, partner: Partner | None = None) -> list[Answer]:
    """Return an answer to the prompt for each sample.

    Args:
        engine: with the weights loaded.
        prompt: at least one token id.
        samples: index of each sample in its group.
        sampling: how to sample; the engine was opened with its temperature, top_k, top_p and stop tokens.
        key: of the run, below 2^64.
        stream: of the prompt, below 2^64.
        room: most tokens that may follow the prompt.
        vocabulary_size: of the model.
        partner: writes what follows each turn of an answer; its errors pass through.

    Raises:
        EngineLost: the engine has ended or hangs.
        RolloutError: what it returned does not fit what it was asked for.
        ValueError: the prompt is empty, or leaves no room for an answer.
    """
    if not prompt or room < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens leaves room for {room}")
    most = min(sampling.tokens, room)
    talks = [Conversation(index, sampling.stop, most, partner) for index in range(len(samples))]
    while True:
        for talk in talks:
            while not talk.over and talk.next_written is not None:
                talk.write()
        going = [index for index, talk in enumerate(talks) if not talk.over]
        if not going:
            break
        prefixes = [Prefix([*prompt, *talks[index].tokens], _limit(talks[index], most, partner),
                           seed_of(key, stream, samples[index], talks[index].place)) for index in going]
        completions = engine.complete(prefixes)
        if len(completions) != len(prefixes):
            raise RolloutError(f"{len(completions)} completions of {len(prefixes)} sequences", where="rollouts.engine",
                               fix=FIX)
        for index, prefix, completion in zip(going, prefixes, completions):
            if problem := problem_of(completion, prefix, sampling.stop, vocabulary_size):
                raise RolloutError(f"a completion is not one: {problem}", where="rollouts.engine", fix=FIX)
            _follow(talks[index], completion)
    return [Answer(talk.tokens, talk.values, talk.stopped, frozenset(talk.written), talk.begin) for talk in talks]


def seed_of(key: int, stream: int, sample: int, place: int) -> int:
    """Return the seed of a completion, below 2^63, for the same answer the same after any kill.

    Args:
        key: see `converse`.
        stream: see `converse`.
        sample: index in the group.
        place: turn and index in the turn of its first token, see `Conversation.place`.
    """
    return hash64(hash64(hash64(key ^ stream) ^ sample) ^ place) >> 1


def problem_of(completion: Completion, prefix: Prefix, stop: frozenset[int], vocabulary_size: int) -> str:
    """Return what is wrong with a completion, "" if nothing is.

    Args:
        completion: of the prefix.
        prefix: what was asked.
        stop: tokens that end a completion.
        vocabulary_size: of the model.
    """
    tokens, values = completion.tokens, completion.log_probabilities
    if not 1 <= len(tokens) <= prefix.most:
        return f"{len(tokens)} tokens, asked were 1 to {prefix.most}"
    if any(type(token) is not int or not 0 <= token < vocabulary_size for token in tokens):
        return f"a token is not in the vocabulary of {vocabulary_size}"
    if len(values) != len(tokens):
        return f"{len(values)} log-probabilities of {len(tokens)} tokens"
    if any(not isinstance(value, float | int) or not math.isfinite(value) or value > 1e-3 for value in values):
        return "a log-probability is not finite, or above 0"
    ends = [token in stop for token in tokens]
    if any(ends[:-1]):
        return "it goes on behind a stop token"
    if len(tokens) < prefix.most and not ends[-1]:
        return f"it has {len(tokens)} of {prefix.most} tokens, and no stop token"
    return ""


def _limit(talk: Conversation, most: int, partner: Partner | None) -> int:
    """Return how many tokens to ask for."""
    left = most - len(talk.tokens)
    if partner is None:
        return left
    left = min(left, CHUNK_TOKENS)
    return min(left, partner.turn_tokens - (len(talk.tokens) - talk.begin)) if partner.turn_tokens else left


def _follow(talk: Conversation, completion: Completion) -> None:
    """Append a completion to an answer, up to the end of the turn."""
    for token, value in zip(completion.tokens, completion.log_probabilities):
        talk.add(token, min(float(value), 0.0))  # rounding may bring a sum of probabilities above 1
        if talk.over or talk.next_written is not None or talk.begin == len(talk.tokens):
            return
