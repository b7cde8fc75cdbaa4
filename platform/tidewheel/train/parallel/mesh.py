"""The ranks of a run as a grid with named dimensions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tidewheel.train.parallel.caches import check_threads, forget_meshes
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.runtime import Runtime

DIMS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outer to inner. Neighbouring ranks talk most: tensor parallel sends activations in every layer."""
DATA = ("replicate", "shard")
"""The dimensions over which the global batch is shared out."""
GRADIENTS = ("replicate", "shard", "context")
"""The dimensions over which gradients are summed: context ranks see different positions of the same rows."""
_builds = itertools.count()
"""Numbers the meshes of this process."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the dimensions, this rank's place in them, and torch's DeviceMesh of those larger than 1.

    The names of the DeviceMesh's dimensions end with `mark`, which no other mesh of this process has. Torch compares
    meshes by shape and names, and its caches of DTensor operations by their meshes; so what a cache of any thread holds
    of an earlier generation's mesh, with another rank and other groups, is never found for this one.
    """

    sizes: dict[str, int]
    rank: int
    device_mesh: DeviceMesh | None
    mark: str = ""

    @classmethod
    def build(cls, parallel: ParallelConfig, runtime: Runtime) -> Mesh:
        """The mesh of `runtime.world_size` ranks; all ranks call it together.

        Raises:
            StaleProcessError: this process still takes tensors for another rank's.
        """
        sizes = mesh_sizes(parallel, runtime.world_size)
        wide = {name: size for name, size in sizes.items() if size > 1}
        if not wide:
            return cls(sizes, runtime.rank, None)
        device = torch.device(runtime.device)
        forget_meshes(device)
        # the rank too: what torch.compile keeps on disk for one rank must not be found by another
        mark = f"@{next(_builds)}.{runtime.rank}"
        names = tuple(name + mark for name in wide)
        mesh = cls(sizes, runtime.rank, init_device_mesh(device.type, tuple(wide.values()), mesh_dim_names=names), mark)
        for name in wide:
            check_threads(mesh.of(name), mesh.coordinate(name), device)
        return mesh

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes.values())

    def size(self, *dims: str) -> int:
        """Ranks along `dims` together."""
        return math.prod(self.sizes[name] for name in dims)

    def coordinate(self, *dims: str) -> int:
        """This rank's place along `dims` together, the last of them counting fastest."""
        place = 0
        for name in dims:
            inner = math.prod(self.sizes[other] for other in DIMS[DIMS.index(name) + 1:])
            place = place * self.sizes[name] + self.rank // inner % self.sizes[name]
        return place

    def of(self, *dims: str) -> DeviceMesh | None:
        """The one-dimensional mesh of the ranks that differ from this one along `dims` only; None when it is alone.

        The first call for several dimensions makes a process group: all ranks must make the same calls.
        """
        wide = tuple(name for name in dims if self.sizes[name] > 1)
        if not wide or self.device_mesh is None:
            return None
        mesh = self.device_mesh[tuple(name + self.mark for name in wide)]
        return mesh if len(wide) == 1 else mesh._flatten("_".join(wide) + self.mark)  # torch keeps it under that name

    def group(self, *dims: str) -> Any:
        """The process group of `of`, None when this rank is alone."""
        mesh = self.of(*dims)
        return None if mesh is None else mesh.get_group()

    def groups(self) -> list[Any]:
        """The process groups of this rank's dimensions, the pipeline left out."""
        groups = [self.group(name) for name in DIMS[1:]]
        return [group for group in groups if group is not None]

    def shard_mesh(self) -> DeviceMesh | None:
        """What FSDP2 shards over: shard x context in one dimension; with several replicas (HSDP) those in front."""
        inner = self.of("shard", "context")
        if self.sizes["replicate"] == 1:
            return inner
        if inner is None or self.device_mesh is None:
            return None
        assert inner.mesh_dim_names is not None
        return self.device_mesh["replicate" + self.mark, inner.mesh_dim_names[0]]

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads."""
        return self.coordinate(*DATA)

    @property
    def data_size(self) -> int:
        """Parts of the global batch."""
        return self.size(*DATA)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its data rank: of all that read the same rows, one counts them."""
        return self.coordinate("pipeline", "context", "tensor") == 0


def dimensions(mesh: DeviceMesh, number: int) -> set[str]:
    """The `DIMS` that dimension `number` of a part of a `Mesh` spans."""
    if mesh.mesh_dim_names is None:
        return set()
    name = mesh.mesh_dim_names[number].partition("@")[0]
    return set(name.split("_"))  # several in one are called by all their names


def mesh_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Size of each of `DIMS` for so many ranks, a number that `legal.check_world` has passed."""
    data = world_size // parallel.unit
    replicate = parallel.replicate if parallel.fully_sharded else data
    return {"pipeline": parallel.pipeline, "replicate": replicate, "shard": data // replicate,
            "context": parallel.context, "tensor": parallel.tensor}
