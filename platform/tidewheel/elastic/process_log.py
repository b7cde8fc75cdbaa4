"""The log of a process of the control plane (coordinator, memory agent, evaluator) in the run's logs/.

Lines take the same way as those of workers (`train.logs`). Nothing here raises or waits for the store, except `close`,
which waits for a few seconds at most: a process of the control plane works without its log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.train.logs.config import LogsConfig

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogTarget:
    """The run whose logs/ a process writes to."""

    uri: str
    run: str
    """Id of the run."""
    settings: LogsConfig

    @classmethod
    def of(cls, config: TrainConfig) -> LogTarget:
        """Return the target that a run's configuration names."""
        return cls(config.run_uri, config.run.id, config.logs)


class ProcessLog:
    """Keeps the log of this process from now on, with what it prints, until `close`.

    Args:
        target: the run; None to keep no log.
        role: "coordinator", "agent" or "evaluator".
        node: id of the node.
    """

    def __init__(self, target: LogTarget | None, role: str, node: str) -> None:
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._role = role
        if target is None:
            return
        try:
            from tidewheel import storage
            from tidewheel.train.logs.worker_log import logging_process

            self._open.enter_context(logging_process(
                target.settings, storage.store(target.uri), run=target.run, node=node[:12], capture=True,
                beside=ray_log_folder(), role=role))
        except Exception:
            logger.exception("the log of this %s is not kept in the run's logs/", role)

    def close(self) -> None:
        """Write the last lines. Calls while another thread closes the log return when that is done."""
        with self._lock:
            try:
                self._open.close()
            except Exception:
                logger.exception("the last lines of this %s were not written", self._role)


def ray_log_folder() -> Path | None:
    """Return the folder in which Ray keeps the output of this process; None if the output goes elsewhere."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return Path(os.readlink("/proc/self/fd/2")).parent
    return None
