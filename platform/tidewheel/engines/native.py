"""Tidewheel's own engine: the decoder that training uses, in the generator's process."""

from __future__ import annotations

from typing import ClassVar

from tidewheel.engines.serving.base import Engine, EngineUse, RunningEngine
from tidewheel.versions import Version


class Native(Engine):
    """Sample with the model that training has. A token follows from weights, prompt, seed and its place alone."""

    VERSION: ClassVar[Version | None] = Version("engine_native")
    REPEATS: ClassVar[bool] = True

    def open(self, use: EngineUse) -> RunningEngine | None:
        """Return None: `inference.group` samples."""
        return None
