"""`--input FILE`: a pipeline over one file instead of those that its recipe's patterns name."""

from __future__ import annotations

import glob
from pathlib import Path

from tidewheel import hub
from tidewheel.data.config import PipelineConfig
from tidewheel.storage import is_remote, split


def of_input(config: PipelineConfig, input: str) -> tuple[PipelineConfig, str]:
    """Return the recipe and the folder to read from. Where `input` is a file, the recipe reads it in place of the files
    that its relative patterns name, and other relative paths are below its folder."""
    if not _is_file(input):
        return config, input
    place, name = split(input)
    standalone = tuple(path for path in config.read.paths if "://" in path or path.startswith(("/", "~")))
    read = config.read.model_copy(update={"paths": (glob.escape(name), *standalone)})
    return config.model_copy(update={"read": read}), place.uri


def _is_file(input: str) -> bool:
    if not is_remote(input):
        return Path(input).is_file()
    if hub.is_hub(input) and not hub.place_of(input).path:
        return False
    if input.endswith("/") or "." not in input.rpartition("/")[2]:  # a folder, most likely: no request for it
        return False
    place, name = split(input)
    return bool(name) and place.exists(name)
