"""Whether the code in an answer passes tests, run in a process without network and with limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from tidewheel.rewards.sandbox.cases import Case, Unusable, cases_of, lines_of
from tidewheel.rewards.sandbox.running import Limits, SandboxFailed, run
from tidewheel.rewards.scoring.base import Failure, Reward, Sample, Scores
from tidewheel.versions import Version

_BLOCK = re.compile(r"^ {0,3}```[^\n`]*\n(.*?)^ {0,3}```", re.DOTALL | re.MULTILINE)


class PythonTests(Reward):
    """1 if the answer's Python code passes all tests of the reference, else 0. The code is the last Markdown block, or
    the whole answer. A reference has assertions, or a JSON list of cases; the code cannot see what they expect."""

    VERSION: ClassVar[Version | None] = Version("reward_python_tests")

    partial: bool = False
    """Score the share of the tests that pass."""
    seconds: int = Field(default=5, ge=1)
    """Processor time of a process: one for all calls of an answer, and one for each input."""
    wall_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Time of a process on the clock."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space of a process, MiB."""
    file_kb: int = Field(default=1024, ge=1)
    """Largest file that it may write, KiB."""
    output_kb: int = Field(default=256, ge=1)
    """Largest output of a process, KiB."""
    sandbox: Literal["full", "limits"] = "full"
    """full: no network, no other process, and no files but an empty folder and the standard library. limits: only
    limits of time and memory, for machines that cannot isolate a process and code that you trust."""

    def needs_reference(self) -> bool:
        """Return True."""
        return True

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Run the code of each answer."""
        values = [0.0] * len(batch)
        failures: dict[int, Failure] = {}
        for index, sample in enumerate(batch):
            try:
                cases = cases_of(sample.reference or "")
                passed = self._passed(code_of(sample.answer), cases)
            except Unusable as error:
                failures[index] = Failure("unusable_reference", str(error))
            except SandboxFailed as error:
                failures[index] = Failure(error.reason, error.detail)
            else:
                values[index] = passed / len(cases) if self.partial else float(passed == len(cases))
        return Scores(values, failures)

    def _passed(self, code: str, cases: Sequence[Case]) -> int:
        """Return the number of cases that pass."""
        limits = Limits(self.seconds, self.wall_seconds, self.memory_mb << 20, self.file_kb << 10,
                        self.output_kb << 10, isolate=self.sandbox == "full")
        calls = [case for case in cases if case.call]
        passed = 0
        if calls:
            texts = run(code, limits, calls=[case.call for case in calls]).output.split("\n")
            passed = sum(case.expected == text for case, text in zip(calls, texts[:-1]))
        for case in cases:
            if not case.call:
                ran = run(code, limits, text=case.input)
                passed += not ran.problem and lines_of(ran.output) == lines_of(case.expected)
        return passed


def code_of(answer: str) -> str:
    """Return the last Markdown block of an answer; the whole answer if it has none."""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer
