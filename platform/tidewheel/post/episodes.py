"""The environment of a group's answers: it takes the turns of the policy, and its replies become tokens once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tidewheel.environments.episode.base import Environment, Reply, Task
from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.inference.conversation import Conversation
from tidewheel.parts import is_own, name_of
from tidewheel.post.ledger import StepEntry
from tidewheel.post.prompts import Prompt, Prompts, encoded
from tidewheel.shards.order import hash64
from tidewheel.shards.rollouts import RolloutShard
from tidewheel.shards.tokenizer import Encoder
from tidewheel.train.policy.config import RolloutsConfig

T = TypeVar("T")
_SALT = 0x454E5649
"""Tells the seeds of environments from the keys of draws."""


class EpisodeFailed(Exception):
    """The environment has failed, and with it the group.

    Args:
        reason: a short name to count by.
        detail: what is special about this group.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def seed_of(run: int, position: int) -> int:
    """Return the seed of the environment for a position of the prompts.

    Args:
        run: `rollouts.seed`.
        position: in the order of the prompts.
    """
    return hash64(hash64(run ^ _SALT) ^ hash64(position))


class Episodes:
    """The other side of a group's conversations, a `inference.conversation.Partner`.

    Args:
        environment: takes the turns.
        prompt: of the group.
        samples: index of each answer in its group.
        seed: see `seed_of`.
        encoder: the tokenizer.
        special_tokens: `rollouts.special_tokens`.
        most: most tokens of an answer.
    """

    def __init__(self, environment: Environment, prompt: Prompt, samples: Sequence[int], *, seed: int,
                 encoder: Encoder, special_tokens: bool, most: int) -> None:
        self._environment, self._prompt, self._samples, self._seed = environment, prompt, samples, seed
        self._encoder, self._special_tokens, self._most = encoder, special_tokens, most
        self.turn_tokens = environment.turn_tokens
        self.rewards = [0.0] * len(samples)
        """Of each answer, the sum over its turns."""
        self._turns = [0] * len(samples)
        self._states: dict[int, Any] = {}
        self._ends = environment.ends()
        # A token has a byte of text or more, so this many tokens hold the longest end and the last token whole.
        self._tail = max((len(end.encode()) for end in self._ends), default=0)

    def opening(self, answer: int) -> Sequence[int]:
        """See `Partner`.

        Raises:
            EpisodeFailed: the environment has failed, or its text leaves no room.
        """
        task = Task(self._prompt.text, self._prompt.reference, self._seed, self._samples[answer])
        self._states[answer], text = self._called(lambda: self._environment.reset(task))
        tokens = encoded(text, self._encoder, self._special_tokens)
        if len(tokens) >= self._most:
            raise EpisodeFailed("no_room", f"reset returned {len(tokens)} tokens, an answer has at most {self._most}")
        return tokens

    def ends(self, turn: Sequence[int]) -> bool:
        """See `Partner`."""
        if not self._ends:
            return False
        text = self._text(turn[-self._tail:])
        return any(end in text for end in self._ends)

    def reply(self, answer: int, turn: Sequence[int]) -> Sequence[int] | None:
        """See `Partner`.

        Raises:
            EpisodeFailed: the environment has failed.
            ConfigError: it returned something else than a reply.
        """
        text = self._text(turn)
        reply = self._called(lambda: self._environment.step(self._states[answer], text))
        if not isinstance(reply, Reply):
            raise ConfigError(f"step returned {type(reply).__name__}", where=name_of(type(self._environment)),
                              fix="return a tw.Reply")
        if reply.failure:
            raise EpisodeFailed(reply.failure)
        if not math.isfinite(reply.reward):
            raise EpisodeFailed("not_finite", f"a reward of {reply.reward}")
        self.rewards[answer] += float(reply.reward)
        self._turns[answer] += 1
        if reply.done or self._turns[answer] >= self._environment.turns:
            return None
        return encoded(reply.text, self._encoder, self._special_tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._encoder.decode([token for token in tokens if token < self._encoder.vocabulary_size])

    def _called(self, call: Callable[[], T]) -> T:
        """Return what a call of the environment returns; the errors of code outside this package fail the group."""
        try:
            return call()
        except (TidewheelError, MemoryError):
            raise
        except Exception as error:
            if not is_own(name_of(type(self._environment))):
                raise
            raise EpisodeFailed("raised", f"{type(error).__name__}: {error}") from error


def problem_of(episodes: Episodes, tokens: Sequence[int], learnt: Sequence[int], stop: frozenset[int], most: int
               ) -> str:
    """Return how a stored answer differs from what the environment replies to its turns, "" if it does not.

    Args:
        episodes: of this answer alone.
        tokens: of the answer.
        learnt: 1 for each token that the policy sampled.
        stop: tokens that end a turn.
        most: most tokens of an answer.
    """
    try:
        talk = Conversation(0, stop, most, episodes)
        for index, (token, sampled) in enumerate(zip(tokens, learnt)):
            if talk.over:
                return f"it goes on behind its end, token {index}"
            expected = talk.next_written
            if (expected is None) != bool(sampled):
                return f"token {index} is {'the policy' if sampled else 'the environment'}'s"
            if expected is None:
                talk.add(token, 0.0)
            elif expected != token:
                return f"the environment now replies with another token {index}"
            else:
                talk.write()
    except EpisodeFailed as error:
        return f"the environment fails now: {error}"
    return "" if talk.over else "it ends before its end"


def replies(entry: StepEntry, shard: RolloutShard, prompts: Prompts, rollouts: RolloutsConfig, encoder: Encoder
            ) -> Iterator[str]:
    """Yield how the answers of a step differ from what the environment replies to their turns.

    Args:
        entry: of the step in the ledger.
        shard: its rollouts.
        prompts: of the run.
        rollouts: the run's settings.
        encoder: the tokenizer.
    """
    environment = rollouts.environment
    if environment is None:
        if not shard.learnt[0].all():
            yield "a token was not sampled, but the run has no environment"
        return
    if entry.environment != environment.key():
        yield "the environment is another one than the ledger says, so its replies cannot be checked"
        return
    if not environment.DETERMINISTIC:
        return
    rows = shard.batch.select(["tokens", "learnt", "sample", "prompt_length", "reward"]).to_pylist()
    if len(rows) != rollouts.group * len(entry.admitted):
        return  # the audit says so
    places = [(position, prompts.at(position)) for position in entry.admitted]
    for index, row in enumerate(rows):
        position, prompt = places[index // rollouts.group]
        episodes = Episodes(environment, prompt, [row["sample"]], seed=seed_of(rollouts.seed, position),
                            encoder=encoder, special_tokens=rollouts.special_tokens, most=rollouts.answer_tokens)
        problem = problem_of(episodes, row["tokens"][row["prompt_length"]:], row["learnt"], frozenset({encoder.eos}),
                             rollouts.answer_tokens)
        if not problem and rollouts.reward is None and not math.isclose(
                episodes.rewards[0], row["reward"], rel_tol=1e-6, abs_tol=1e-6):
            problem = f"its reward is {row['reward']:g}, the environment gives {episodes.rewards[0]:g}"
        if problem:
            yield f"sample {row['sample']} of {prompt.id!r}: {problem}"
