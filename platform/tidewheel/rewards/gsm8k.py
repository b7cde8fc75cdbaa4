"""Whether an answer ends in the right number, as the solutions of GSM8K do (https://arxiv.org/abs/2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import ClassVar

from pydantic import Field

from tidewheel.rewards.scoring.base import Failure, Reward, Sample, Scores
from tidewheel.versions import Version

MAX_DIGITS = 64
"""A longer number counts as none."""
_RUN = re.compile(r"(?:(?<![\w)])-)?[$€£]?\.?[0-9][0-9.,]*+")
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]*+)(?:\.[0-9]++)?")


class Gsm8k(Reward):
    """1 if the number behind the last `marker` of the answer equals the reference's, else 0. Numbers compare by value:
    1,000 is 1000.00; a currency sign before and a full stop behind do not count."""

    VERSION: ClassVar[Version | None] = Version("reward_gsm8k")

    marker: str = Field(default="####", min_length=1)
    """What stands before the final number, in the same line."""
    last_number: bool = False
    """Of an answer without the marker, take the last number."""

    def needs_reference(self) -> bool:
        """Return True."""
        return True

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Compare the final numbers. A reference is a solution with the marker, or a number."""
        values = [0.0] * len(batch)
        failures: dict[int, Failure] = {}
        for index, sample in enumerate(batch):
            reference = self._final(sample.reference or "", last_number=True)
            if reference is None:
                failures[index] = Failure("unusable_reference", "it holds no number")
            else:
                values[index] = float(self._final(sample.answer, self.last_number) == reference)
        return Scores(values, failures)

    def _final(self, text: str, last_number: bool) -> Decimal | None:
        _, marker, behind = text.rpartition(self.marker)
        if marker:
            run = _RUN.search(behind.lstrip(" \t").partition("\n")[0])
            return _number(run.group()) if run else None
        last = ""
        for match in _RUN.finditer(text) if last_number else ():
            last = match.group()
        return _number(last)


def _number(run: str) -> Decimal | None:
    digits = run.lstrip("-$€£").rstrip(".,")
    if not digits or len(digits) > MAX_DIGITS or not _NUMBER.fullmatch(digits):
        return None
    value = Decimal(digits.replace(",", ""))
    return value.copy_negate() if run.startswith("-") else value
