"""`Reward`, the base of all rewards: a part that judges answers to prompts.

    class Brief(tw.Reward):
        "1 for an answer of at most `max_words` words, else 0."
        max_words: int = 50

        def score(self, batch):
            return [float(len(sample.answer.split()) <= self.max_words) for sample in batch]

    def polite(sample):  # prompt, answer, reference
        return "please" in sample.answer  # a number, True or False; a string is the reason why there is no score

A failure is never a reward. An answer that cannot be judged has no score, and a reason: training drops it, and does not
learn from it as if it were wrong. The built-in rewards are the modules of `tidewheel.rewards`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tidewheel.config import recipe_hash
from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.parts import Part, is_own, name_of
from tidewheel.versions import Version

if TYPE_CHECKING:
    import numpy as np

OWN = Version("own_rewards")
"""Version of how rewards from outside the package are applied. Keys also contain the reward's source."""
DETAIL_CHARACTERS = 200
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer to judge.

    Args:
        prompt: what the model was asked.
        answer: what it wrote.
        reference: the right answer, as the data set has it; None if there is none.
    """

    prompt: str
    answer: str
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an answer has no score.

    Args:
        reason: a short name to count by, such as "no_reference".
        detail: what is special about this answer.
    """

    reason: str
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", self.detail[:DETAIL_CHARACTERS])


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of n answers.

    Args:
        values: float64 [n]; not read where there is a failure, and NaN there after `Reward.judge`.
        failures: why an answer has no score, by its index in the batch.
    """

    values: Sequence[float] | np.ndarray
    failures: Mapping[int, Failure] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Mean of the scores, without failures; None if there is no score."""
        scored = [float(value) for index, value in enumerate(self.values) if index not in self.failures]
        return math.fsum(scored) / len(scored) if scored else None


class NotJudged(Exception):
    """A batch was given up; `failure` says why. Raised by what calls `Reward.score` elsewhere."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


Judge = Callable[[Sequence[Sample]], "Scores | Sequence[float] | np.ndarray"]


class Reward(Part):
    """Base of a reward: its fields are its settings."""

    max_characters: int = Field(default=1_000_000, ge=1)
    """Longest answer or reference that is judged; with a longer one there is no score."""

    def score(self, batch: Sequence[Sample]) -> Scores | Sequence[float] | np.ndarray:
        """Return the scores of a batch, float64 [n]; with failures, `Scores`.

        A score must depend on the sample alone: not on the others in the batch, the time or chance. A batch whose
        scoring fails is halved and scored again, until the answers to blame are found.
        """
        raise NotImplementedError

    def needs_reference(self) -> bool:
        """Return whether it compares with a reference; then `score` gets no sample without one."""
        return False

    def judge(self, batch: Sequence[Sample], by: Judge | None = None) -> Scores:
        """Return the checked scores of a batch: finite float64 values, NaN where there is a failure.

        Args:
            batch: the answers.
            by: what calls `score` elsewhere, in another process for one; None to call it here. It may raise
                `NotJudged`.

        Raises:
            ConfigError: what `score` returned does not fit the batch.
        """
        import numpy as np

        values = np.full(len(batch), np.nan)
        unfit = {index: failure for index, sample in enumerate(batch) if (failure := self._unfit(sample))}
        failures = dict(unfit)
        _fill(self, by or self.score, batch, [index for index in range(len(batch)) if index not in unfit], values,
              failures)
        return Scores(values, dict(sorted(failures.items())))

    def key(self) -> str:
        """Return the hash that equal scores have in common: of the name, version, settings and own source."""
        version = self.VERSION or OWN
        return recipe_hash({"reward": self.decisive(), "versions": version.numbers()})

    def _unfit(self, sample: Sample) -> Failure | None:
        reference = sample.reference or ""
        longest = max(len(sample.answer), len(reference))
        if longest > self.max_characters:
            return Failure("answer_too_long", f"{longest} characters, more than {self.max_characters}")
        if any(map(_SURROGATE.search, (sample.prompt, sample.answer, reference))):
            return Failure("invalid_unicode")
        if self.needs_reference() and sample.reference is None:
            return Failure("no_reference")
        return None


class FunctionReward(Reward):
    """Reward that calls a function for each sample: it returns the score, or the reason why there is none."""

    function: ClassVar[Callable[[Sample], float | str]]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> type[Reward]:
        """Return the reward class that calls a function."""
        return type(cls.__name__, (cls,), {"function": staticmethod(function), "__module__": __name__})

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Call the function for each sample."""
        answers = [type(self).function(sample) for sample in batch]
        failures = {index: Failure(answer) for index, answer in enumerate(answers) if isinstance(answer, str)}
        return Scores([0.0 if isinstance(answer, str) else answer for answer in answers], failures)


def fitting(reward: Reward, scores: Any, count: int) -> Scores:
    """Return scores as float64 [count] with the failures that they imply.

    Args:
        reward: the reward, for messages.
        scores: what it returned.
        count: number of answers.

    Raises:
        ConfigError: they are no numbers, or not `count`.
    """
    import numpy as np

    given = scores if isinstance(scores, Scores) else Scores(scores)
    where = name_of(type(reward))
    try:
        values = np.array(given.values, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"score returned no numbers: {error}", where=where,
                          fix="return a number for each sample, or tw.Scores") from None
    wrong = [index for index in given.failures if index not in range(count)]
    if values.shape != (count,) or wrong:
        shown = f"a failure of sample {wrong[0]}" if wrong else f"values of shape {list(values.shape)}"
        raise ConfigError(f"score returned {shown} for {count} samples", where=where,
                          fix="return one value a sample; failures by their index in the batch")
    infinite = np.flatnonzero(~np.isfinite(values)).tolist()
    failures = {index: Failure("not_finite", str(values[index])) for index in infinite} | dict(given.failures)
    values[list(failures)] = np.nan
    return Scores(values, failures)


def _fill(reward: Reward, judge: Judge, batch: Sequence[Sample], indices: Sequence[int], values: np.ndarray,
          failures: dict[int, Failure]) -> None:
    """Score the samples at `indices`; halve them when that fails."""
    if not indices:
        return
    try:
        scores = fitting(reward, judge([batch[index] for index in indices]), len(indices))
    except NotJudged as error:
        failure = error.failure
    except (TidewheelError, MemoryError):  # neither says anything about an answer
        raise
    except Exception as error:
        if not is_own(name_of(type(reward))):
            raise
        failure = Failure("raised", f"{type(error).__name__}: {error}")
    else:
        values[list(indices)] = scores.values
        failures.update({indices[index]: failure for index, failure in scores.failures.items()})
        return
    if len(indices) == 1:
        failures[indices[0]] = failure
        return
    middle = len(indices) // 2
    _fill(reward, judge, batch, indices[:middle], values, failures)
    _fill(reward, judge, batch, indices[middle:], values, failures)
