"""What torch remembers of DeviceMeshes in a process that goes from one generation of the run to the next.

DTensor caches, for each operation, the layout of its result, and in it a mesh. To torch two meshes are equal when shape
and names are, whatever the rank of the process and the groups they stand for. A cache that outlives a generation
answers with the mesh of before: in a process that has got another rank, tensors become the other rank's shard without
an error. Some of these caches belong to a thread, and on CUDA the backward pass runs in threads of autograd's own: they
live as long as the process, and nobody else can clear them.

So every mesh of the run has names of its own (`mesh.Mesh`): what is cached for another one is never found. Here the
caches that can be reached are emptied, which gives their memory back, and every generation checks, in the threads that
compute, that this process takes a tensor for its own rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class StaleProcessError(RuntimeError):
    """This process computes with a mesh of an earlier generation: only a new process can take part."""


def forget_meshes(device: torch.device | str = "cpu") -> None:
    """Empty torch's caches of DTensor operations, in this thread and in autograd's of `device`. Call it once the groups
    of the meshes before are gone."""
    _clear()
    in_backward(_clear, device)


def check_threads(mesh: DeviceMesh | None, coordinate: int, device: torch.device | str = "cpu") -> None:
    """Shard a known tensor over the one-dimensional `mesh`, in this thread and in autograd's of `device`; no
    communication.

    Raises:
        StaleProcessError: what came out are not the rows of `coordinate`, or they are on another mesh.
    """
    if mesh is None:
        return

    def check() -> None:
        whole = torch.arange(4 * mesh.size(), device=device).view(-1, 2)
        with torch.no_grad():
            copies: Any = DTensor.from_local(whole, mesh, [Replicate()], run_check=False) * 1
            rows = copies.redistribute(placements=[Shard(0)])
        if rows.device_mesh is not mesh or not torch.equal(rows.to_local(), whole[2 * coordinate:2 * coordinate + 2]):
            raise StaleProcessError(f"rank {dist.get_rank()} gets rows {rows.to_local()[:, 0].tolist()} of "
                                    f"{whole[:, 0].tolist()} over {mesh}, in which it is number {coordinate}: torch "
                                    "has kept a mesh of an earlier generation")

    check()
    in_backward(check, device)


def check_current(tensors: Iterable[torch.Tensor], mark: str) -> None:
    """Check that the sharded ones among `tensors` lie on parts of the mesh with this `mark`, and know this process by
    the rank it has now.

    Raises:
        StaleProcessError: one is of an earlier generation of this process, or on a mesh that later generations could
            not be told from.
    """
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    for mesh in meshes.values():
        place = (mesh.mesh == dist.get_rank()).nonzero()
        if place.tolist() != [list(mesh.get_coordinate() or [])]:
            raise StaleProcessError(f"a tensor is sharded for another rank than {dist.get_rank()}: its mesh is "
                                    f"{mesh.mesh.tolist()}, its place there {mesh.get_coordinate()}")
        names = mesh.mesh_dim_names or ("",)
        if not all(name.endswith(mark) for name in names):
            raise StaleProcessError(f"a tensor is sharded over {mesh}, whose names do not end with {mark}: it is not "
                                    "of this generation's `Mesh`")


def in_backward(function: Callable[[], Any], device: torch.device | str) -> None:
    """Call `function` in the thread in which autograd computes gradients on `device`: on CPU that is this one."""
    leaf = torch.zeros((), device=device, requires_grad=True)
    with torch.enable_grad():
        result = leaf * 1

    def call(gradient: torch.Tensor) -> None:
        function()

    result.register_hook(call)
    result.backward()


def _clear() -> None:
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for owner, name in ((_redistribute, "_gen_transform_infos"), (propagator, "_propagate_tensor_meta_cached"),
                        (propagator, "_propagate_tensor_meta")):
        cached: Any = getattr(owner, name, None)  # which there are depends on torch's version
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
