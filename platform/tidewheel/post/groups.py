"""Sample and judge one group: the work of a generator, as a plain function of its job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidewheel.environments.episode.base import Environment
from tidewheel.inference.conversation import Partner
from tidewheel.inference.group import Answer, Sampling
from tidewheel.post.episodes import EpisodeFailed, Episodes, seed_of
from tidewheel.post.fetching import Fetched
from tidewheel.post.policy import Version
from tidewheel.post.prompts import Prompt
from tidewheel.rewards.scoring.base import Sample, Scores
from tidewheel.shards.order import hash64
from tidewheel.shards.tokenizer import Encoder

Judge = Callable[[Sequence[Sample]], Scores]


class SampleGroup(Protocol):
    """Samples answers to a prompt, as `inference.group.sample_group` does with a model."""

    def __call__(self, prompt: Sequence[int], samples: Sequence[int], sampling: Sampling, *, key: int, stream: int,
                 partner: Partner | None = None) -> list[Answer]:
        """Return an answer for each sample."""
        ...


@dataclass(frozen=True)
class Job:
    """A group to sample. With the weights it is all that its answers follow from."""

    position: int
    """Of the prompt in the run's order."""
    prompt: Prompt
    version: Version
    """Of the policy that samples."""


@dataclass(frozen=True)
class Group:
    """A sampled group, or why there is none."""

    position: int
    prompt_id: str
    version: int
    answers: tuple[Answer, ...] = ()
    rewards: tuple[float, ...] = ()
    referred: tuple[list[float], ...] = ()
    """Log-probabilities of the answers' tokens under the reference model; empty: there is none."""
    values: tuple[list[float], ...] = ()
    """Value before each token of the answers; empty: there is no value head."""
    failure: str = ""
    """Reason why the group is not trained on, a short name to count by; "" if it has rewards."""
    detail: str = ""
    seconds: float = field(default=0.0, compare=False)
    """Processor time of sampling and judging."""
    fetched: Fetched = field(default=Fetched(), compare=False)
    """What the process read to have the policy's version."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)


def make_group(job: Job, sample: SampleGroup, encoder: Encoder, judge: Judge | None, sampling: Sampling, *,
               answers: int, seed: int, environment: Environment | None = None, special_tokens: bool = False) -> Group:
    """Return the group of a job.

    Args:
        job: the prompt and the version, with whose weights `sample` samples.
        sample: the engine.
        encoder: its tokenizer.
        judge: scores the last turns of answers, see `Reward.judge`; None if the environment's rewards are all.
        sampling: how to sample.
        answers: number of answers.
        seed: of the run's rollouts.
        environment: the other side of the answers, if they have one.
        special_tokens: `rollouts.special_tokens`.
    """
    prompt, name = job.prompt, (job.position, job.prompt.id, job.version.number)
    rewards, episodes = [0.0] * answers, None
    try:
        if environment is not None:
            episodes = Episodes(environment, prompt, range(answers), seed=seed_of(seed, job.position), encoder=encoder,
                                special_tokens=special_tokens, most=sampling.tokens)
            rewards = episodes.rewards
        sampled = sample(prompt.tokens, range(answers), sampling, key=hash64(seed), stream=hash64(job.position),
                         partner=episodes)
    except EpisodeFailed as error:
        return Group(*name, failure=f"environment: {error.reason}", detail=error.detail)
    if judge is not None:
        scores = judge([Sample(prompt.text, _text(answer, encoder, sampling), prompt.reference) for answer in sampled])
        if scores.failures:
            first = next(iter(scores.failures.values()))
            return Group(*name, failure=f"reward: {first.reason}", detail=first.detail)
        rewards = [reward + float(value) for reward, value in zip(rewards, scores.values)]
    return Group(*name, answers=tuple(sampled), rewards=tuple(rewards))


def _text(answer: Answer, encoder: Encoder, sampling: Sampling) -> str:
    """Return the text of the last turn of an answer, without the token that ended it."""
    tokens = answer.tokens[answer.begin:]
    if tokens and tokens[-1] in sampling.stop:
        tokens = tokens[:-1]
    return encoder.decode([token for token in tokens if token < encoder.vocabulary_size])
