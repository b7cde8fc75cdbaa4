"""Whether an answer is the reference, after both are brought into a normal form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import ClassVar, Literal

from tidewheel.rewards.scoring.base import Failure, Reward, Sample, Scores
from tidewheel.versions import Version

MARKS_IN_A_ROW = 30
"""As in the stream-safe text format of Unicode (UAX #15): normalising a longer row takes quadratic time."""
_JOINER = "\u034f"
"""Combining grapheme joiner, which ends a row of marks."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)


class ExactMatch(Reward):
    """1 if the answer is the reference, else 0. With all of `ignore_case`, `ignore_punctuation` and `ignore_articles`
    texts compare as in SQuAD's exact match (https://arxiv.org/abs/1606.05250)."""

    VERSION: ClassVar[Version | None] = Version("reward_exact_match")

    after: str = ""
    """Compare only the text after the last of these marks, such as "Answer:". An answer without a mark scores 0."""
    unicode: Literal["NFC", "NFKC", "none"] = "NFC"
    """Normal form of Unicode."""
    collapse_spaces: bool = True
    """Make one space of each run of white space, and none at the ends."""
    ignore_case: bool = False
    """Compare with case folded."""
    ignore_punctuation: bool = False
    """Leave out characters whose Unicode category is punctuation."""
    ignore_articles: bool = False
    """Leave out the English words a, an and the."""

    def needs_reference(self) -> bool:
        """Return True."""
        return True

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Compare each answer with its reference."""
        values = [0.0] * len(batch)
        failures: dict[int, Failure] = {}
        for index, sample in enumerate(batch):
            reference = self._normal(sample.reference or "")
            _, mark, answer = sample.answer.rpartition(self.after) if self.after else ("", "", sample.answer)
            if not reference:
                failures[index] = Failure("unusable_reference", "nothing is left of it to compare")
            elif mark or not self.after:
                values[index] = float(self._normal(answer) == reference)
        return Scores(values, failures)

    def _normal(self, text: str) -> str:
        if self.unicode != "none" and not text.isascii():
            text = unicodedata.normalize(self.unicode, _stream_safe(text))
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(character for character in text if unicodedata.category(character)[0] != "P")
        if self.ignore_articles:
            text = _ARTICLES.sub(" ", text)
        return " ".join(text.split()) if self.collapse_spaces else text


def _stream_safe(text: str) -> str:
    """Return a text with a joiner in each row of more than `MARKS_IN_A_ROW` combining marks."""
    characters: list[str] = []
    row = 0
    for character in text:
        row = row + 1 if unicodedata.combining(character) else 0
        if row > MARKS_IN_A_ROW:
            characters.append(_JOINER)
            row = 1
        characters.append(character)
    return "".join(characters)
