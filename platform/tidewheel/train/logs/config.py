"""Settings of a run's logs. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from tidewheel.config import Config

LEVELS = ("debug", "info", "warning", "error", "critical")
"""Names of `logging`'s levels in lower case, the least important first."""


class LogsConfig(Config):
    """Logs of workers. The run's logs/ holds the lines of all workers; `tidewheel logs RUN` shows them."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Least level of records that are written. Printed output is always written, with level info."""
    format: Literal["text", "json"] = "text"
    """Format of the lines in Ray's log folder. The run's logs/ always holds JSON lines."""
