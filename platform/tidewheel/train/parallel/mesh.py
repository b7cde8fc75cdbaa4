"""The mesh: the ranks of a run as a grid with named dimensions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tidewheel.train.parallel.caches import check_threads, forget_meshes
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.runtime import Runtime

DIMS = ("pipeline", "replicate", "shard", "context", "tensor")
"""From outermost to innermost. Neighbours communicate most: tensor parallelism sends activations in each layer."""
DATA = ("replicate", "shard")
"""Dimensions over which the global batch is sharded."""
GRADIENTS = ("replicate", "shard", "context")
"""Dimensions over which gradients are summed. Context ranks see different positions of the same rows."""
EXPERTS = ("shard", "context")
"""Dimensions whose ranks share experts, see `Mesh.experts`."""
EXPERT_DIMS = ("expertshard", "expert")
"""Dimensions of the second view of these ranks. An expert's weights are on one rank of `expert`, which neighbours
share; FSDP2 shards them over `expertshard`."""
_builds = itertools.count()
"""Counts the meshes of this process."""
_own_group: list[bool] = []
"""Not empty if `Mesh.build` has opened torch's process group of this rank alone."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, and this rank's coordinates among them.

    The names of the DeviceMesh's dimensions end with `mark`, which no other mesh of this process has. Torch compares
    meshes by shape and names, so its caches of DTensor operations never return a mesh of an earlier generation, with
    another rank and other process groups.

    Args:
        sizes: of all `DIMS`.
        rank: of this process.
        device_mesh: torch's mesh of the dimensions larger than 1; None if there are none. With `parallel.offload` it
            also has the dimension `shard` if that has one rank only, for FSDP2, which moves parameters to the device.
        mark: suffix of the names of its dimensions.
        expert: number of neighbouring ranks of shard x context that share the experts, see `experts`.
        experts: a second view of the ranks of shard x context, with the dimensions `EXPERT_DIMS`; None without expert
            parallelism.
    """

    sizes: dict[str, int]
    rank: int
    device_mesh: DeviceMesh | None
    mark: str = ""
    expert: int = 1
    experts: DeviceMesh | None = None

    @classmethod
    def build(cls, parallel: ParallelConfig, runtime: Runtime) -> Mesh:
        """Create the mesh of `runtime.world_size` ranks. All ranks must call it together.

        Args:
            parallel: the layout.
            runtime: this rank, the world size and the device.

        Raises:
            StaleProcessError: torch still shards tensors for the rank that this process had before.
        """
        sizes = mesh_sizes(parallel, runtime.world_size)
        alone = is_alone(parallel, sizes)
        wide = {name: size for name, size in sizes.items() if size > 1 or (alone and name == "shard")}
        if not wide:
            return cls(sizes, runtime.rank, None)
        device = torch.device(runtime.device)
        if runtime.world_size == 1 and not dist.is_initialized():  # FSDP2 of one rank sends nothing to others
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            _own_group[:] = [True]
        forget_meshes(device)
        # with the rank, so that torch.compile's cache on disk is not shared between ranks
        mark = f"@{next(_builds)}.{runtime.rank}"
        names = tuple(name + mark for name in wide)
        mesh = cls(sizes, runtime.rank, init_device_mesh(device.type, tuple(wide.values()), mesh_dim_names=names), mark)
        for name in wide:
            check_threads(mesh.of(name), mesh.coordinate(name), device)
        if parallel.expert > 1:
            mesh = dataclasses.replace(mesh, expert=parallel.expert, experts=mesh._view_of_experts(parallel.expert))
        return mesh

    def _view_of_experts(self, expert: int) -> DeviceMesh:
        """Return the ranks of shard x context as (groups, ranks of a group that share the experts)."""
        ranks = self.of(*EXPERTS)
        assert ranks is not None  # `legal` refuses a number of workers without it
        return ranks._unflatten(0, (ranks.size() // expert, expert), tuple(name + self.mark for name in EXPERT_DIMS))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.sizes.values())

    def size(self, *dims: str) -> int:
        """Return the product of the sizes of `dims`."""
        return math.prod(self.sizes[name] for name in dims)

    def coordinate(self, *dims: str) -> int:
        """Return this rank's coordinate along `dims` together; the last of them varies fastest."""
        coordinate = 0
        for name in dims:
            inner = math.prod(self.sizes[other] for other in DIMS[DIMS.index(name) + 1:])
            coordinate = coordinate * self.sizes[name] + self.rank // inner % self.sizes[name]
        return coordinate

    def of(self, *dims: str) -> DeviceMesh | None:
        """Return the one-dimensional mesh of the ranks that differ from this one only along `dims`.

        None if there is no other rank. The first call for several dimensions creates a process group, so all ranks must
        make the same calls.
        """
        wide = tuple(name for name in dims if self.sizes[name] > 1)
        if not wide or self.device_mesh is None:
            return None
        mesh = self.device_mesh[tuple(name + self.mark for name in wide)]
        return mesh if len(wide) == 1 else mesh._flatten("_".join(wide) + self.mark)  # torch caches it by name

    def group(self, *dims: str) -> Any:
        """Return the process group of `of`; None if there is no other rank."""
        mesh = self.of(*dims)
        return None if mesh is None else mesh.get_group()

    def groups(self) -> list[Any]:
        """Return the process groups of this rank's dimensions, except the pipeline's."""
        groups = [self.group(name) for name in DIMS[1:]]
        if self.experts is not None:
            groups += self.experts.get_all_groups()
        return [group for group in groups if group is not None]

    @property
    def expert_rank(self) -> int:
        """Return which part of the experts this rank holds."""
        return self.coordinate(*EXPERTS) % self.expert

    def expert_group(self) -> Any:
        """Return the process group of the ranks that share the experts."""
        assert self.experts is not None
        return self.experts.get_group(EXPERT_DIMS[1] + self.mark)

    def expert_mesh(self) -> DeviceMesh:
        """Return the mesh of an expert's weights before FSDP2: the ranks that share experts, then those of tensor."""
        assert self.experts is not None
        ranks = self.experts[EXPERT_DIMS[1] + self.mark]
        tensor = self.of("tensor")
        return ranks if tensor is None else DeviceMesh._concatenate([ranks, tensor])

    def expert_shard_mesh(self, *, replicate: bool = True) -> DeviceMesh:
        """Return the mesh for FSDP2 of the experts: the ranks with the same experts, after replicas with HSDP.

        Args:
            replicate: whether to include the dimension of replicas.
        """
        assert self.experts is not None
        ranks = self.experts[EXPERT_DIMS[0] + self.mark]
        copies = self.of("replicate") if replicate else None
        return ranks if copies is None else DeviceMesh._concatenate([copies, ranks])

    def shard_mesh(self) -> DeviceMesh | None:
        """Return the mesh for FSDP2: shard x context in one dimension, after a dimension of replicas with HSDP.

        It has one rank if this rank offloads alone; None: nothing is sharded.
        """
        inner = self.of("shard", "context")
        if inner is None and self.device_mesh is not None and "shard" + self.mark in self._names:
            return self.device_mesh["shard" + self.mark]
        if self.sizes["replicate"] == 1:
            return inner
        if inner is None or self.device_mesh is None:
            return None
        assert inner.mesh_dim_names is not None
        return self.device_mesh["replicate" + self.mark, inner.mesh_dim_names[0]]

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.device_mesh.mesh_dim_names or ()) if self.device_mesh is not None else ()

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's part of the global batch."""
        return self.coordinate(*DATA)

    @property
    def data_size(self) -> int:
        """Return the number of parts of the global batch."""
        return self.size(*DATA)

    @property
    def leads(self) -> bool:
        """Return whether this is the first of the ranks that read the same rows; it alone counts them."""
        return self.coordinate("pipeline", "context", "tensor") == 0


def dimensions(mesh: DeviceMesh, index: int) -> set[str]:
    """Return the names in `DIMS` that dimension `index` of a part of a `Mesh` spans."""
    if mesh.mesh_dim_names is None:
        return set()
    name = mesh.mesh_dim_names[index].partition("@")[0]
    if name in EXPERT_DIMS:  # weights of experts are sharded over both
        return set(EXPERTS)
    return set(name.split("_"))  # the name of a flattened dimension joins the names of its parts


def close_own_group() -> None:
    """Close the process group that `Mesh.build` has opened for one rank, if it did."""
    if _own_group and dist.is_initialized():
        dist.destroy_process_group()
    _own_group.clear()


def is_alone(parallel: ParallelConfig, sizes: dict[str, int]) -> bool:
    """Return whether a rank offloads parameters that it shares with no other rank.

    Args:
        parallel: the layout.
        sizes: of all `DIMS`.
    """
    return parallel.offload and all(sizes[name] == 1 for name in ("pipeline", "replicate", "shard", "context"))


def mesh_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Return the size of each of `DIMS` for a world size that `legal.check_world` accepts."""
    data = world_size // parallel.unit
    replicate = parallel.copies(data) if parallel.fully_sharded else data
    return {"pipeline": parallel.pipeline, "replicate": replicate, "shard": data // replicate,
            "context": parallel.context, "tensor": parallel.tensor}
