"""The ranks of a run as a grid with named dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.runtime import Runtime

DIMS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outer to inner. Neighbouring ranks talk most: tensor parallel sends activations in every layer."""
DATA = ("replicate", "shard")
"""The dimensions over which the global batch is shared out."""
GRADIENTS = ("replicate", "shard", "context")
"""The dimensions over which gradients are summed: context ranks see different positions of the same rows."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the dimensions, this rank's place in them, and torch's DeviceMesh of those larger than 1."""

    sizes: dict[str, int]
    rank: int
    device_mesh: DeviceMesh | None

    @classmethod
    def build(cls, parallel: ParallelConfig, runtime: Runtime) -> Mesh:
        """The mesh of `runtime.world_size` ranks; all ranks call it together."""
        sizes = mesh_sizes(parallel, runtime.world_size)
        wide = {name: size for name, size in sizes.items() if size > 1}
        grid = None
        if wide:
            forget_meshes()
            kind = torch.device(runtime.device).type
            grid = init_device_mesh(kind, tuple(wide.values()), mesh_dim_names=tuple(wide))
        return cls(sizes, runtime.rank, grid)

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
        mesh = self.device_mesh[wide]
        return mesh if len(wide) == 1 else mesh._flatten("_".join(wide))  # torch keeps it under that name

    def group(self, *dims: str) -> Any:
        """The process group of `of`, None when this rank is alone."""
        mesh = self.of(*dims)
        return None if mesh is None else mesh.get_group()

    def groups(self) -> list[Any]:
        """The process groups of this rank's dimensions, the pipeline left out."""
        wide = [] if self.device_mesh is None else [name for name in DIMS[1:] if self.sizes[name] > 1]
        return [self.device_mesh.get_group(name) for name in wide] if self.device_mesh is not None else []

    def shard_mesh(self) -> DeviceMesh | None:
        """What FSDP2 shards over: shard x context in one dimension; with several replicas (HSDP) those in front."""
        inner = self.of("shard", "context")
        if self.sizes["replicate"] == 1:
            return inner
        if inner is None or self.device_mesh is None:
            return None
        assert inner.mesh_dim_names is not None
        return self.device_mesh["replicate", inner.mesh_dim_names[0]]

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


def forget_meshes() -> None:
    """Make torch forget the meshes that this process had before; to be called once their groups are gone.

    Two DeviceMeshes are equal to torch when their shapes are, whatever the rank of the process that made them and
    whichever groups they stand for. So its caches of DTensor operations would answer with the mesh of before: in a
    process that has got another rank, parameters would be taken for another rank's shard without any error.

    The caches are those of the calling thread, which on CPU runs the backward pass too. On CUDA the threads of autograd
    keep theirs; only DTensor operations in a backward pass (tensor parallel) would notice.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    if hasattr(_redistribute, "_gen_transform_infos"):  # newer torch
        _redistribute._gen_transform_infos.cache_clear()


def check_current(tensors: Iterable[torch.Tensor]) -> None:
    """That the sharded ones among `tensors` know this process by the rank it has now.

    Raises:
        RuntimeError: one is of an earlier generation of this process: only a new process can go on.
    """
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    for mesh in meshes.values():
        place = (mesh.mesh == dist.get_rank()).nonzero()
        if place.tolist() != [list(mesh.get_coordinate() or [])]:
            raise RuntimeError(f"a tensor is sharded for another rank than {dist.get_rank()}: its mesh is "
                               f"{mesh.mesh.tolist()}, its place there {mesh.get_coordinate()}")


def mesh_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Size of each of `DIMS` for so many ranks, a number that `legal.check_world` has passed."""
    data = world_size // parallel.unit
    replicate = parallel.replicate if parallel.fully_sharded else data
    return {"pipeline": parallel.pipeline, "replicate": replicate, "shard": data // replicate,
            "context": parallel.context, "tensor": parallel.tensor}
