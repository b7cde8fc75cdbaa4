"""Read whole parameters from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidewheel.checkpoint.manifest import CheckpointManifest
from tidewheel.checkpoint.reading import read_tensors
from tidewheel.errors import CheckpointError
from tidewheel.storage import Store
from tidewheel.train.runtime import AVERAGE


def read_stored(checkpoints: Store, name: str, manifest: CheckpointManifest, names: Sequence[str], *,
                average: str = "") -> dict[str, torch.Tensor]:
    """Return whole parameters as a checkpoint holds them, by name.

    Args:
        checkpoints: the run's `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest.
        names: names of parameters in the model.
        average: name of an average of the trained parameters, which is returned in their place.

    Raises:
        CheckpointError: the checkpoint lacks one of them.
    """
    keys: dict[str, str] = {}
    for parameter in names:
        key = manifest.extra["averages"][average].get("optimizer") if average else None
        averaged = [f"optimizer/{parameter}.{key}" if key else f"{AVERAGE}/{average}/{parameter}"] if average else []
        stored = [key for key in (*averaged, f"optimizer/{parameter}.master", f"model/{parameter}")
                  if key in manifest.tensors]
        if not stored:
            raise CheckpointError(f"{parameter} is not in the checkpoint", where=checkpoints.at(name),
                                  fix="use the version of Tidewheel that wrote it")
        keys[parameter] = stored[0]
    state = {key: torch.empty(manifest.tensors[key].shape, dtype=getattr(torch, manifest.tensors[key].dtype))
             for key in keys.values()}
    read_tensors(checkpoints, name, manifest, state)
    return {parameter: state[key] for parameter, key in keys.items()}
