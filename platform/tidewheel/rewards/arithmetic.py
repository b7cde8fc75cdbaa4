"""Whether an answer is an arithmetic expression with the right value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

from pydantic import Field

from tidewheel.rewards.scoring.base import Failure, Reward, Sample, Scores
from tidewheel.rewards.scoring.expressions import tokens_of, value_of
from tidewheel.versions import Version


class Arithmetic(Reward):
    """1 if the answer is an expression of decimal numbers, + - * / and parentheses with the reference's value, else 0.
    Values are exact fractions: 1/3 is not 0.333. With `numbers` the reference is a value and the numbers that make it,
    such as "24: 3 3 8 8", and the expression must use each of them once, as in the game Countdown."""

    VERSION: ClassVar[Version | None] = Version("reward_arithmetic")

    after: str = ""
    """Take only the text after the last of these marks, to the end of its line. An answer without a mark scores 0."""
    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Largest difference of the two values."""
    numbers: bool = False
    """Whether a reference also names the numbers to use."""

    def needs_reference(self) -> bool:
        """Return True."""
        return True

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Compare the value of each answer with that of its reference."""
        values = [0.0] * len(batch)
        failures: dict[int, Failure] = {}
        for index, sample in enumerate(batch):
            target, _, given = (sample.reference or "").partition(":") if self.numbers else (sample.reference, "", "")
            reference = value_of(target or "")
            if reference is None or (self.numbers and not all(map(_is_number, given.split() or ("",)))):
                failures[index] = Failure("unusable_reference", 'it is no expression, or not "VALUE: NUMBERS"')
                continue
            text = self._expression(sample.answer)
            value = value_of(text)
            right = value is not None and abs(value - reference) <= Fraction(self.tolerance)
            values[index] = float(right and (not self.numbers or _uses(text, given)))
        return Scores(values, failures)

    def _expression(self, answer: str) -> str:
        if not self.after:
            return answer
        _, mark, behind = answer.rpartition(self.after)
        return behind.lstrip(" \t").partition("\n")[0] if mark else ""


def _uses(expression: str, given: str) -> bool:
    used = Counter(Fraction(token) for token in tokens_of(expression) if _is_number(token))
    return used == Counter(map(Fraction, given.split()))


def _is_number(text: str) -> bool:
    return text[:1].isdigit() and len(tokens_of(text)) == 1
