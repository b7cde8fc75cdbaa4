"""`--input FILE`: run a pipeline on one file instead of the files that its recipe's patterns match."""

from __future__ import annotations

import glob
from pathlib import Path

from tidewheel.data.config import PipelineConfig
from tidewheel.storage import is_remote, split
from tidewheel.stores import versioned


def of_input(config: PipelineConfig, input: str) -> tuple[PipelineConfig, str]:
    """Return the recipe and the folder to read from.

    If `input` is a file, the recipe reads it instead of the files that its relative patterns match, and other relative
    paths are below the file's folder.
    """
    if not _is_file(input):
        return config, input
    folder, name = split(input)
    standalone = tuple(path for path in config.read.paths if "://" in path or path.startswith(("/", "~")))
    read = config.read.model_copy(update={"paths": (glob.escape(name), *standalone)})
    return config.model_copy(update={"read": read}), folder.uri


def _is_file(input: str) -> bool:
    if not is_remote(input):
        return Path(input).is_file()
    named = versioned(input)
    if named is not None and not named.path:
        return False
    if input.endswith("/") or "." not in input.rpartition("/")[2]:  # most likely a folder: save the request
        return False
    folder, name = split(input)
    return bool(name) and folder.exists(name)
