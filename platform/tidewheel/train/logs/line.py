"""One line of a worker's log, its formats, and the removal of secrets from it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from tidewheel.errors import without_credentials
from tidewheel.secret_patterns import KEYS

PRINTED = "output"
"""Logger of lines that were printed to standard output or standard error."""
HIDDEN = "[hidden]"
"""Text that replaces a secret."""
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|AUTH_?KEY", re.IGNORECASE)
_SHORTEST_SECRET = 8
_PATTERNS = [re.compile(pattern) for pattern in KEYS.values()]


@dataclass
class Position:
    """Position of this process in its run. The training loop keeps it up to date."""

    run: str = ""
    generation: int = 0
    rank: int = 0
    step: int = 0
    role: str = ""
    """"coordinator", "agent" or "evaluator"; "" for a worker, which has a rank."""

    def begin(self, generation: int, rank: int) -> None:
        """Note the start of a generation in which this process has a rank."""
        self.generation, self.rank, self.step = generation, rank, 0


HERE = Position()
"""Position of this process."""


@dataclass(frozen=True)
class LogLine:
    """One line of a worker's log."""

    time: float
    """Unix time of the record; for printed lines, of their reading from the process's output."""
    level: str
    run: str
    generation: int
    rank: int
    step: int
    logger: str
    """Name of the logger; `PRINTED` for printed lines."""
    text: str
    process: str
    """Name of the worker process in the run's logs/."""
    at: int
    """Offset of the line in the process's output; (process, at) is unique."""
    role: str = ""
    """See `Position`."""

    def as_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the line as text. Each physical line begins with time, level, run, generation, rank and step."""
        rank_or_role = f"role={self.role}" if self.role else f"rank={self.rank}"
        head = (f"{shown_time(self.time)} {self.level.upper():<8} {self.run} generation={self.generation} "
                f"{rank_or_role} step={self.step} {self.logger}: ")
        return "\n".join(head + part for part in self.text.split("\n"))

    def shown(self, style: str) -> str:
        """Return the line as "text" or as one line of "json"."""
        return self.as_text() if style == "text" else json.dumps(self.as_json(), separators=(",", ":"))

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> LogLine:
        """Return the line of the values that `as_json` returned.

        Raises:
            KeyError, TypeError, ValueError: the values are not those of a line.
        """
        return cls(float(values["time"]), str(values["level"]), str(values["run"]), int(values["generation"]),
                   int(values["rank"]), int(values["step"]), str(values["logger"]), str(values["text"]),
                   str(values["process"]), int(values["at"]), str(values.get("role", "")))


def shown_time(seconds: float) -> str:
    """Return a Unix time as 2026-11-23T02:25:47.123Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Redactor:
    """Removes secrets from texts.

    Secrets are the values of environment variables with such a name (AWS_SECRET_ACCESS_KEY, HF_TOKEN, ...), texts that
    look like a key (`secret_patterns`), and the user and password in a URI.

    Args:
        environment: of the process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        known = os.environ if environment is None else environment
        values = {value for name, value in known.items()
                  if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET}
        self._values = sorted(values, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return the text with each secret replaced by `HIDDEN`."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        for pattern in _PATTERNS:
            text = pattern.sub(HIDDEN, text)
        return without_credentials(text)
