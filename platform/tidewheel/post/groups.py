"""Sample and judge one group: the work of a generator, as a plain function of its job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidewheel.inference.group import Answer, Sampling, sample_group
from tidewheel.models.decoder import Decoder
from tidewheel.post.fetching import Fetched
from tidewheel.post.policy import Version
from tidewheel.post.prompts import Prompt
from tidewheel.rewards.scoring.base import Sample, Scores
from tidewheel.shards.order import hash64
from tidewheel.shards.tokenizer import Encoder

Judge = Callable[[Sequence[Sample]], Scores]


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


def make_group(job: Job, model: Decoder, encoder: Encoder, judge: Judge, sampling: Sampling, *, answers: int,
               seed: int) -> Group:
    """Return the group of a job.

    Args:
        job: the prompt and the version, whose weights `model` has.
        model: the policy.
        encoder: its tokenizer.
        judge: scores answers, see `Reward.judge`.
        sampling: how to sample.
        answers: number of answers.
        seed: of the run's rollouts.
    """
    prompt = job.prompt
    sampled = sample_group(model, prompt.tokens, range(answers), sampling, key=hash64(seed),
                           stream=hash64(job.position))
    texts = [_text(answer, encoder, sampling) for answer in sampled]
    scores = judge([Sample(prompt.text, text, prompt.reference) for text in texts])
    name = (job.position, prompt.id, job.version.number)
    if scores.failures:
        first = next(iter(scores.failures.values()))
        return Group(*name, failure=f"reward: {first.reason}", detail=first.detail)
    return Group(*name, answers=tuple(sampled), rewards=tuple(float(value) for value in scores.values))


def _text(answer: Answer, encoder: Encoder, sampling: Sampling) -> str:
    """Return the text of an answer without the token that ended it."""
    tokens = answer.tokens[:-1] if answer.stopped else answer.tokens
    return encoder.decode([token for token in tokens if token < encoder.vocabulary_size])
