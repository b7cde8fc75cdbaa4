"""Checkpoints of adapter runs: they hold the adapter alone, and name the base with its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.stored import read_stored
from tidewheel.checkpoint.verify import check_files, locate
from tidewheel.errors import CheckpointError
from tidewheel.models import adapters
from tidewheel.models.adapter import MARK, Adapter
from tidewheel.models.family import Model
from tidewheel.models.initial_values import init_parameter
from tidewheel.storage import Store


@dataclass(frozen=True)
class Base:
    """The frozen model of an adapter's checkpoint.

    Args:
        uri: of its checkpoint; "": the initial values of `seed`.
        hash: `CheckpointManifest.model_hash`.
        vocabulary_size: rows of its embedding.
        seed: of the run.
    """

    uri: str
    hash: str
    vocabulary_size: int
    seed: int

    def read(self, config: Model, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
        """Return its whole parameters by name.

        Args:
            config: of the model.
            shapes: of the parameters to return, by name.

        Raises:
            CheckpointError: the base is missing, damaged, or another one than the adapter was trained on.
        """
        if not self.uri:
            return {name: init_parameter(name, shape, config, self.seed) for name, shape in shapes.items()}
        _, checkpoints, name = locate(self.uri)
        manifest = read_manifest(checkpoints, name)
        where = checkpoints.at(name)
        if manifest.model_hash != self.hash:
            raise CheckpointError(f"this is not the base that the adapter was trained on: hash {manifest.model_hash}, "
                                  f"not {self.hash}", where=where, fix="restore the base's checkpoint from a copy")
        check_files(checkpoints, name, manifest)
        return read_stored(checkpoints, name, manifest, list(shapes))

    def fill(self, config: Model, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set some of its parameters.

        Args:
            config: of the model.
            tensors: whole parameters by name, which are filled.
        """
        values = self.read(config, {name: tensor.shape for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def read_base(base: Base, config: Model, shapes: dict[str, torch.Size], checkpoints: Store, name: str,
              manifest: CheckpointManifest) -> dict[str, torch.Tensor]:
    """Return what an adapter was trained on: its base, whose buffers (biases that balance experts) may have moved.

    Args:
        base: of the checkpoint.
        config: of the model.
        shapes: of the parameters and buffers to return, by name.
        checkpoints: the run's `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest.

    Raises:
        CheckpointError: see `Base.read`.
    """
    moved = [path for path in shapes if f"model/{path}" in manifest.tensors]
    return {**base.read(config, shapes), **read_stored(checkpoints, name, manifest, moved)}


def base_of(manifest: CheckpointManifest) -> Base | None:
    """Return the base of an adapter's checkpoint; None: the checkpoint holds a whole model."""
    base: dict[str, Any] | None = manifest.extra.get("base")
    if base is None:
        return None
    return Base(str(base["from"]), str(base["hash"]), int(base["vocabulary_size"]), int(manifest.extra.get("seed", 0)))


def adapter_of(manifest: CheckpointManifest) -> Adapter:
    """Return the settings of an adapter's checkpoint."""
    settings = dict(manifest.extra["identity"]["adapter"])
    return adapters.KIND.build(settings.pop("kind"), settings)


def adapter_values(checkpoints: Store, name: str, manifest: CheckpointManifest, average: str = ""
                   ) -> dict[str, torch.Tensor]:
    """Return the whole parameters of an adapter's checkpoint, by their names in the whole model.

    Args:
        checkpoints: the run's `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest.
        average: see `read_stored`.
    """
    paths = [path.removeprefix("model/") for path in manifest.tensors if path.startswith("model/")]
    return read_stored(checkpoints, name, manifest, [path for path in paths if MARK in path],
                       average=average)
