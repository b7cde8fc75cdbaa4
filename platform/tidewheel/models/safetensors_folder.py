"""The safetensors files of a Hugging Face folder: one file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import safetensors
import safetensors.torch
import torch

from tidewheel.errors import CheckpointError
from tidewheel.storage import Store

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Store) -> dict[str, list[str]]:
    """Return {file: names of its weights}.

    Raises:
        CheckpointError: there are no safetensors files, or a file is damaged.
    """
    if folder.exists(INDEX):
        files: dict[str, list[str]] = {}
        for name, key in folder.read_json(INDEX)["weight_map"].items():
            files.setdefault(str(key), []).append(name)
        return dict(sorted(files.items()))
    if not folder.exists(WEIGHTS):
        raise CheckpointError(f"there is neither {WEIGHTS} nor {INDEX}", where=folder.uri,
                              fix="give a model in safetensors format; pickled weights are not loaded")
    return {WEIGHTS: _listed(folder, WEIGHTS)}


def _listed(folder: Store, key: str) -> list[str]:
    """Return the names in a safetensors file, whose head is JSON with its size in 8 bytes before it.

    https://github.com/huggingface/safetensors#format
    """
    try:
        size = int.from_bytes(folder.read(key, 0, 8), "little")
        entries: dict[str, Any] = json.loads(folder.read(key, 8, size))
        return [name for name in entries if name != "__metadata__"]
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=folder.at(key),
                              fix="download the model again") from None


def read_tensors(folder: Store, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a file. Of a remote file, all are in memory at once.

    Args:
        folder: of the model.
        key: name of the file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = folder.local_path(key)
    try:
        if path is None:
            yield from safetensors.torch.load(folder.read(key)).items()
            return
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_tensor(name)
    except (FileNotFoundError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {str(error) or 'missing'}", where=folder.at(key),
                              fix="download the model again") from None
