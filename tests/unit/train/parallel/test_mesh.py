"""Tests of the mesh: coordinates, groups, replicas, stale caches."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks import on_ranks
from tidewheel.models.families import Llama
from tidewheel.train.parallel.caches import StaleProcessError, check_current, check_threads
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.data_parallel import _shard_rows, _shares
from tidewheel.train.parallel.mesh import DIMS, GRADIENTS, Mesh
from tidewheel.train.parallel.model import ParallelModel
from tidewheel.train.runtime import Runtime


@given(st.tuples(*[st.integers(1, 3) for _ in DIMS]))
def test_coordinates_equal_a_brute_force_numbering(numbers):
    sizes = dict(zip(DIMS, numbers))
    places = itertools.product(*(range(size) for size in numbers))
    data: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        mesh = Mesh(sizes, rank, None)
        assert tuple(mesh.coordinate(name) for name in DIMS) == place
        if mesh.leads:
            data.setdefault(mesh.data_rank, []).append(rank)
    assert mesh.world_size == math.prod(numbers)
    assert list(data) == list(range(mesh.data_size)), "leaders in order of rank have the data ranks in order"
    assert all(len(ranks) == 1 for ranks in data.values())


@given(rows=st.integers(0, 9), ranks=st.integers(1, 5))
def test_rows_are_sharded_as_torch_chunks_them(rows, ranks):
    tensor = torch.arange(rows * 2).view(rows, 2)
    shares = _shares(tensor, ranks)
    assert len(shares) == ranks
    assert torch.equal(torch.cat(shares), tensor)
    assert [len(share) for share in shares] == sorted((len(share) for share in shares), reverse=True)


def meshes() -> None:
    rank = torch.distributed.get_rank()
    for parallel in ({"data": "ddp"}, {"data": "zero3"}, {"data": "zero3", "replicate": 2},
                     {"data": "zero3", "context": 2}, {"data": "ddp", "context": 2, "tensor": 2},
                     {"data": "zero3", "replicate": 2, "context": 2}, {"pipeline": 2, "tensor": 2}):
        mesh = Mesh.build(ParallelConfig.model_validate(parallel), Runtime(rank, 4))
        wide = {name: size for name, size in mesh.sizes.items() if size > 1}
        assert mesh.device_mesh is not None
        coordinate = mesh.device_mesh.get_coordinate()
        assert coordinate is not None
        assert dict(zip(wide, coordinate)) == {name: mesh.coordinate(name) for name in wide}
        group = mesh.group(*GRADIENTS)
        others = [other for other in range(4) if all(Mesh(mesh.sizes, other, None).coordinate(name)
                  == mesh.coordinate(name) for name in ("pipeline", "tensor"))]
        assert others == ([rank] if group is None else torch.distributed.get_process_group_ranks(group))
        replicas(mesh)


def replicas(mesh: Mesh) -> None:
    """A squared norm divided by `replicas` on each rank sums to that of the whole tensor."""
    whole = torch.arange(10.0)
    model = ParallelModel([], [], mesh, Llama(), 128, 10)
    tensor = whole
    if (shards := mesh.shard_mesh()) is not None:
        tensor = distribute_tensor(whole, shards, [Replicate()] * (shards.ndim - 1) + [Shard(0)])
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    share = part.square().sum() / model.replicas(tensor)
    torch.distributed.all_reduce(share)
    assert share == pytest.approx(float(whole.square().sum()) * mesh.size("pipeline"))


def rows_of_what_is_cut_already() -> None:
    """A tensor-parallel DTensor that is sharded further by rows still gathers to the whole tensor."""
    mesh = Mesh.build(ParallelConfig(data="zero1", tensor=2), Runtime(torch.distributed.get_rank(), 4))
    data, tensor = mesh.of("replicate"), mesh.of("tensor")
    assert data is not None
    assert tensor is not None
    for placement in (Shard(0), Shard(1), Replicate()):
        whole = torch.arange(48.0).view(12, 4)
        cut = distribute_tensor(whole, tensor, [placement])
        rows = _shard_rows(cut, data)
        assert rows.to_local().untyped_storage().data_ptr() == cut.to_local().untyped_storage().data_ptr()
        assert torch.equal(rows.full_tensor(), whole), placement


def views_of_experts() -> None:
    """Neighbours of shard x context share the experts; the groups are part of what a broken run aborts."""
    rank = dist.get_rank()
    for parallel, neighbours, same in (({"expert": 2}, [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]),
                                       ({"expert": 4, "context": 2}, [0, 1, 2, 3], [rank]),
                                       ({"expert": 2, "tensor": 2}, [rank % 2, rank % 2 + 2], [rank])):
        mesh = Mesh.build(ParallelConfig.model_validate(parallel), Runtime(rank, 4))
        assert mesh.experts is not None
        assert dist.get_process_group_ranks(mesh.expert_group()) == neighbours
        assert neighbours[mesh.expert_rank] == rank
        shards = mesh.expert_shard_mesh()
        assert dist.get_process_group_ranks(shards.get_group()) == same
        assert mesh.expert_group() in mesh.groups()
        whole = torch.arange(8.0)
        model = ParallelModel([], [], mesh, Llama(), 128, 10)
        held = whole.chunk(mesh.expert)[mesh.expert_rank].chunk(shards.size())[shards.get_local_rank()]
        grid = DeviceMesh._concatenate([shards, mesh.expert_mesh()])
        placements = [_StridedShard(0, split_factor=mesh.expert), Shard(0)] + [Replicate()] * (grid.ndim - 2)
        part = DTensor.from_local(held, grid, placements, run_check=False, shape=(8,), stride=(1,))
        assert torch.equal(part.full_tensor(), whole)
        share = held.square().sum() / model.replicas(part)
        first = held.square().sum() * model.first_holder(part)
        for total in (share, first):
            dist.all_reduce(total)
            assert total == pytest.approx(float(whole.square().sum()))


def everything_about_meshes() -> None:
    meshes()
    views_of_experts()
    rows_of_what_is_cut_already()


def test_meshes_of_four_ranks_have_the_right_groups_and_replicas():
    on_ranks(4, everything_about_meshes)


def _sharded_for_another_rank() -> None:
    mesh = Mesh.build(ParallelConfig(), Runtime(dist.get_rank(), 2))
    shards = mesh.shard_mesh()
    assert shards is not None
    tensors = [distribute_tensor(torch.ones(4), shards, [Shard(0)]), torch.ones(2)]
    check_current(tensors, mesh.mark)
    with mock.patch.object(dist, "get_rank", return_value=1 - dist.get_rank()), \
            pytest.raises(StaleProcessError, match="sharded for another rank"):
        check_current(tensors, mesh.mark)
    with pytest.raises(StaleProcessError, match="not of this generation"):
        check_current(tensors, Mesh.build(ParallelConfig(), Runtime(dist.get_rank(), 2)).mark)
    unmarked = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(StaleProcessError, match="not of this generation"):
        check_current([unmarked], mesh.mark)


def test_a_tensor_of_an_earlier_generation_is_refused():
    on_ranks(2, _sharded_for_another_rank)


def _stale_caches() -> None:
    """Torch returns cached results of the first of two meshes with equal shapes and names for the second."""
    rank = dist.get_rank()
    check_threads(init_device_mesh("cpu", (2,)), rank)
    with pytest.raises(StaleProcessError, match="cached a mesh of an earlier generation"):
        check_threads(init_device_mesh("cpu", (2,)), rank)
    for _ in range(2):
        Mesh.build(ParallelConfig(), Runtime(rank, 2))


def test_a_stale_cache_of_an_earlier_mesh_is_detected():
    on_ranks(2, _stale_caches)
