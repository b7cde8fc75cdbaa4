"""Torch's caches of DeviceMeshes, in a process that takes part in several generations of a run.

For each operation, DTensor caches the layout of the result, which contains a mesh. Torch takes two meshes for equal if
their shapes and names are, even if the rank of the process and the process groups differ. So a cache that outlives a
generation returns the old mesh. If the process has another rank now, tensors silently become the other rank's shard.
Some of these caches are thread-local, and on CUDA the backward pass runs in autograd's threads, which live as long as
the process; no other thread can clear their caches.

Therefore every mesh of a run has unique names (`mesh.Mesh`), and entries for other meshes never match. This module
clears the caches that can be reached, to free their memory. Each generation also checks, in the threads that compute,
that a tensor is sharded for the current rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class StaleProcessError(RuntimeError):
    """This process computes with a mesh of an earlier generation, so it must be replaced."""


def forget_meshes(device: torch.device | str = "cpu") -> None:
    """Clear torch's caches of DTensor operations, in this thread and in autograd's thread of `device`.

    Call it after the process groups of earlier meshes are destroyed.
    """
    _clear()
    in_backward(_clear, device)


def check_threads(mesh: DeviceMesh | None, coordinate: int, device: torch.device | str = "cpu") -> None:
    """Check that this thread and autograd's thread shard a tensor for the current rank. Nothing is communicated.

    Args:
        mesh: one-dimensional; None: nothing to check.
        coordinate: this rank's coordinate in it.
        device: that computes.

    Raises:
        StaleProcessError: the resulting rows are not those of `coordinate`, or they are on another mesh.
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
                                    f"{whole[:, 0].tolist()} over {mesh}, where its coordinate is {coordinate}: torch "
                                    "has cached a mesh of an earlier generation")

    check()
    in_backward(check, device)


def check_current(tensors: Iterable[torch.Tensor], mark: str) -> None:
    """Check that sharded tensors are on the current mesh, for this process's current rank.

    Args:
        tensors: plain tensors are skipped.
        mark: suffix of the dimension names of the current `Mesh`.

    Raises:
        StaleProcessError: a tensor is on a mesh of an earlier generation, or on a mesh without a unique name.
    """
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    for mesh in meshes.values():
        coordinates = (mesh.mesh == dist.get_rank()).nonzero()
        if coordinates.tolist() != [list(mesh.get_coordinate() or [])]:
            raise StaleProcessError(f"a tensor is sharded for another rank than {dist.get_rank()}: its mesh is "
                                    f"{mesh.mesh.tolist()}, its coordinate there {mesh.get_coordinate()}")
        names = mesh.mesh_dim_names or ("",)
        if not all(name.endswith(mark) for name in names):
            raise StaleProcessError(f"a tensor is sharded over {mesh}, whose names do not end with {mark}: it is not "
                                    "of this generation's `Mesh`")


def in_backward(function: Callable[[], Any], device: torch.device | str) -> None:
    """Call `function` in the thread that computes gradients on `device`. On CPU that is this thread."""
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
        cached: Any = getattr(owner, name, None)  # depends on torch's version
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
