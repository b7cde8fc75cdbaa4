"""Whether a regular expression matches an answer.

Patterns are in RE2's syntax (https://github.com/google/re2/wiki/Syntax) and run by pyarrow, because RE2's time grows in
proportion to the answer's length for any pattern. Python's `re` can take exponential time, and cannot be interrupted.
The price: no backreferences and no look-around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import pydantic

from tidewheel.rewards.scoring.base import Failure, Reward, Sample, Scores
from tidewheel.versions import Version

GROUP = "answer"
_OPENED = f"(?P<{GROUP}>"


class Regex(Reward):
    """1 if the pattern is found in the answer, else 0. If the pattern has a group `(?P<answer>...)`, the text of the
    group must also be the reference, without white space at the ends of both."""

    VERSION: ClassVar[Version | None] = Version("reward_regex")

    pattern: str
    """In RE2's syntax. `^` and `$` are the answer's ends; `(?s)` lets a dot match line ends, `(?i)` ignores case."""

    @pydantic.model_validator(mode="after")
    def _compiles(self) -> Self:
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.pattern:
            raise ValueError("pattern: it is empty, and would match every answer")
        empty = pa.array([""], pa.large_string())
        try:
            pc.match_substring_regex(empty, self.pattern)
            if self.needs_reference():
                pc.extract_regex(empty, self.pattern)
        except (pa.ArrowInvalid, UnicodeEncodeError) as error:
            fix = "write other groups as (?:...)" if "unnamed groups" in str(error) else (
                "RE2 has no backreferences and no look-around")
            raise ValueError(f"pattern: {error}; {fix}") from None
        return self

    def needs_reference(self) -> bool:
        """Return whether the pattern has the group."""
        return _OPENED in self.pattern

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Look for the pattern in each answer."""
        import pyarrow as pa
        import pyarrow.compute as pc

        answers = pa.array([sample.answer for sample in batch], pa.large_string())
        if not self.needs_reference():
            return Scores([float(matches) for matches in pc.match_substring_regex(answers, self.pattern).to_pylist()])
        values = [0.0] * len(batch)
        failures: dict[int, Failure] = {}
        for index, groups in enumerate(pc.extract_regex(answers, self.pattern).to_pylist()):
            reference = (batch[index].reference or "").strip()
            if not reference:
                failures[index] = Failure("unusable_reference", "it is empty")
            elif groups is not None:
                values[index] = float(groups[GROUP].strip() == reference)
        return Scores(values, failures)
