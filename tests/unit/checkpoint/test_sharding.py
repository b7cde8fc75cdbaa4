"""The rule by which ranks share a tensor, compared with torch's placements and with a search of all ranks."""

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tidewheel.checkpoint.agreement import Row, shared_by
from tidewheel.checkpoint.sharding import Box, Cut, Sharding
from tidewheel.errors import CheckpointError


def filled(sharding: Sharding, ranks: int) -> torch.Tensor:
    """Return how many ranks hold each element."""
    count = torch.zeros(sharding.shape, dtype=torch.int64)
    for rank in range(ranks):
        box = sharding.on(rank)
        if box is not None:
            count[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes))] += 1
    return count


def some_rules(number: int) -> list[Sharding]:
    """Return random rules: up to three cuts of tensors with up to three dimensions, evenly or not."""
    rng = random.Random(0)
    rules = []
    for _ in range(number):
        shape = tuple(rng.choice((1, 2, 3, 5, 8, 13)) for _ in range(rng.randint(1, 3)))
        pieces = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
        strides, stride = [], rng.randint(1, 2)
        for count in pieces:
            strides.append(stride)
            stride *= count * rng.choice((1, 1, 2))
        cuts = [Cut(rng.randrange(len(shape)), count, step) for count, step in zip(pieces, strides)]
        rules.append(Sharding(shape, tuple(rng.sample(cuts, len(cuts))), rng.randint(0, 3)))
    return rules


@pytest.mark.parametrize("sharding", some_rules(60), ids=str)
def test_every_element_is_on_one_rank(sharding: Sharding):
    assert torch.equal(filled(sharding, sharding.last + 2), torch.ones(sharding.shape, dtype=torch.int64))


@pytest.mark.parametrize("sharding", some_rules(60), ids=str)
def test_the_pieces_within_a_box_are_those_that_a_search_of_all_ranks_finds(sharding: Sharding):
    rng = random.Random(str(sharding))
    for _ in range(10):
        offsets = tuple(rng.randrange(size) for size in sharding.shape)
        wanted = Box(offsets, tuple(rng.randint(0, size - offset) for size, offset in zip(sharding.shape, offsets)))
        found = sorted(sharding.within(wanted), key=lambda item: item[0])
        searched = []
        for rank in range(sharding.last + 2):
            box = sharding.on(rank)
            if box is not None and box.common(wanted) is not None:
                searched.append((rank, box))
        assert found == searched


@pytest.mark.parametrize("rows", [1, 3, 7, 8, 24])
@pytest.mark.parametrize("placements", [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)),
                                        (Replicate(), Shard(0)), (Shard(1), Replicate())], ids=str)
def test_torch_places_parts_by_the_same_rule(placements: tuple, rows: int):
    shape, mesh, strides = (rows, 6), (2, 4), (4, 1)
    cuts = tuple(Cut(placement.dim, mesh[axis], strides[axis])
                 for axis, placement in enumerate(placements) if isinstance(placement, Shard))
    sharding = Sharding(shape, cuts)
    for coordinate in itertools.product(*map(range, mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        rank = sum(index * stride for index, stride, placement in zip(coordinate, strides, placements)
                   if isinstance(placement, Shard))
        assert sharding.on(rank) == (Box(tuple(offsets), tuple(sizes)) if math.prod(sizes) else None)


def test_what_fsdp_shards_after_tensor_parallelism():
    """The axis of FSDP comes first in the mesh, and its cut last."""
    shape, mesh = (16, 3), (2, 4)
    sharding = Sharding(shape, (Cut(0, 4, 1), Cut(0, 2, 4)))
    for coordinate in itertools.product(range(2), range(4)):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), (_StridedShard(0, split_factor=4), Shard(0)))
        assert sharding.on(coordinate[0] * 4 + coordinate[1]) == Box(tuple(offsets), tuple(sizes))


def test_a_tensor_without_elements_is_on_the_first_rank():
    sharding = Sharding((0, 4), (Cut(0, 3, 1),), 2)
    assert [sharding.on(rank) for rank in range(6)] == [None, None, Box((0, 0), (0, 4)), None, None, None]


def row(name: str, shape: tuple[int, ...], *, cuts: tuple[Cut, ...] = (), copies: tuple[Cut, ...] = (),
        first: int = -1) -> Row:
    return Row(name, "float32", shape, cuts, copies, first)


def written(tables: list, ranks: int) -> list[int]:
    """Return the number of elements that each rank writes."""
    entries = shared_by(tables)
    totals = [0] * ranks
    for entry in entries.values():
        assert entry.shared is not None
        boxes = [entry.shared.on(rank) for rank in range(ranks)]
        assert sum(box.elements for box in boxes if box is not None) == math.prod(entry.shape)
        totals = [total + (0 if box is None else box.elements) for total, box in zip(totals, boxes)]
    return totals


def test_what_all_ranks_have_is_written_by_all_in_equal_shares():
    table = tuple(row(f"{index:02}", (4, 4)) for index in range(20))
    assert written([(table, range(4))], 4) == [80, 80, 80, 80]


def test_replicas_of_shards_are_written_in_equal_shares():
    """HSDP 2 x 4: ranks 0-3 hold a replica, and ranks 4-7."""
    table = tuple(row(f"{index:02}", (8, 4), cuts=(Cut(0, 4, 1),), copies=(Cut(-1, 2, 4),), first=0)
                  for index in range(6))
    assert written([(table, range(8))], 8) == [24] * 8


def test_stages_of_a_pipeline_have_tables_of_their_own():
    """Ranks 0-1 are the first stage and 2-3 the second; both hold "tied", which is written once."""
    first = (row("a", (4,), cuts=(Cut(0, 2, 1),), first=0), row("tied", (6,)))
    second = (row("b", (4,), cuts=(Cut(0, 2, 1),), first=2), row("tied", (6,)))
    assert written([(first, range(2)), (second, range(2, 4))], 4) == [8, 2, 2, 2]


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match=r"a is float32 \[4\] on one rank, float32 \[5\] on another"):
        shared_by([((row("a", (4,)),), [0]), ((row("a", (5,)),), [1])])
