"""Workers that load a checkpoint together read each byte once, verify it, and pass it on."""

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.counting_store import CountingStore
from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, equal, manager, state
from tidewheel.checkpoint import pieces, shared_reading
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.pieces import OverlappingParts, pieces_of
from tidewheel.checkpoint.read_plan import Needs, covers, hop, plan, ranges_of
from tidewheel.checkpoint.shared_reading import Sharing
from tidewheel.checkpoint.tensor_entry import Chunk, RankFile, TensorEntry
from tidewheel.storage import store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RANKS = 4


def save(root: Path) -> None:
    """Save `state(1)`, sharded over all ranks, at step 1."""
    saver = manager(store(root))
    saver.save(1, state(1, init_device_mesh("cpu", (dist.get_world_size(),))), {"step": 1})
    saver.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    on_ranks(2, save, root)
    return root


def two_copies(seed: int) -> dict[str, Any]:
    """Return the state on 2 replicas of 2 shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    values = state(seed)
    for group in values.values():
        for name, tensor in group.items():
            if tensor.ndim and tensor.numel():
                group[name] = distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
    return values


def total(value: int) -> int:
    """Return the sum over all ranks."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return int(tensor)


def load_and_count(root: Path) -> None:
    """Load into several layouts, and compare the bytes that all ranks have read with the size of the checkpoint."""
    pieces_of.__defaults__ = (64,)  # so that a small state has many pieces
    manifest = read_manifest(store(root), "step_00000001")
    size, heads = manifest.total_bytes, sum(file.head for file in manifest.files)
    rank = dist.get_rank()
    layouts = {"ddp": lambda: state(9), "fsdp": lambda: state(9, init_device_mesh("cpu", (RANKS,))),
               "hsdp": lambda: two_copies(9)}
    by_two_nodes, seen = Sharing("node", f"node {rank // 2}"), {}
    for name, values in layouts.items():
        for sharing in (Sharing("off"), by_two_nodes, Sharing("all")):
            target, loaded = CountingStore(root), values()
            assert manager(target, sharing=sharing).load_latest(loaded) == {"step": 1}
            assert equal(loaded, state(1)), (name, sharing)
            seen[name, sharing.scope] = total(target.bytes)
    assert [seen[name, "all"] for name in layouts] == [size] * 3
    assert seen["ddp", "node"] == 2 * size
    assert size <= seen["hsdp", "node"] <= 2 * size
    assert seen["ddp", "off"] == size + RANKS * (size - heads), "to compare the hashes, and for each worker"
    assert seen["fsdp", "off"] > size


def test_four_workers_read_each_byte_once(saved: Path):
    on_ranks(RANKS, load_and_count, saved)


def load_damaged(root: Path) -> None:
    rank = dist.get_rank()
    for scope in ("all", "node"):
        values, events = state(9), Events()
        loader = manager(store(root), events, sharing=Sharing(scope, f"node {rank // 2}"))
        assert loader.load_latest(values) == {"step": 1}
        assert equal(values, state(1)), "the intact checkpoint replaces what was read of the damaged one"
        refused = events.of("checkpoint_refused")
        assert len(refused) == (rank == 0)
        assert all("hash differs" in detail["reason"] and detail["reason"].count(";") == 0 for detail in refused)


def test_a_flipped_bit_is_found_by_its_reader_and_refused_by_all(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    saver = manager(store(tmp_path))
    saver.save(2, state(2), {"step": 2})
    saver.wait()
    [victim] = (tmp_path / "step_00000002").glob("rank_*")
    data = bytearray(victim.read_bytes())
    data[-3] ^= 4
    victim.write_bytes(data)
    on_ranks(RANKS, load_damaged, tmp_path)


class DyingStore(CountingStore):
    """The process ends at its second read of a file."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key.endswith(".safetensors") and self.requests:
            os._exit(0)
        return super().read(key, start, length)


def load_beside_a_death(root: Path, verdicts: Path) -> None:
    pieces_of.__defaults__ = (64,)
    rank, values = dist.get_rank(), state(9)
    target = DyingStore(root) if rank == 1 else CountingStore(root)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        manager(target).load_latest(values)
    (verdicts / str(rank)).write_text(str(time.monotonic() - began))
    os._exit(0)  # there is no group left to leave in an orderly way


def test_a_reader_that_dies_does_not_hang_the_others(saved: Path, tmp_path: Path):
    on_ranks(RANKS, load_beside_a_death, saved, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3"]


def listed(parts: list[tuple[int, tuple[int, ...]]], bytes_: int) -> CheckpointManifest:
    """Return a manifest of one file with listed parts of fp32 tensors: (first byte, shape)."""
    tensors = {str(number): TensorEntry("float32", shape, (Chunk(0, start, (0,) * len(shape), shape),))
               for number, (start, shape) in enumerate(parts)}
    return CheckpointManifest(1, 1, 0.0, (RankFile("file", bytes_, ""),), tensors, {})


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 7), max_size=3)), max_size=6),
       st.integers(0, 90), st.integers(4, 200))
def test_pieces_are_the_file_and_their_parts_are_the_tensors(gaps, behind, limit):
    file, parts = bytearray(), []
    rng = random.Random(0)
    for gap, shape in gaps:
        file += bytes(4 * gap)
        parts.append((len(file), tuple(shape)))
        file += rng.randbytes(4 * torch.Size(shape).numel())
    file += bytes(behind)
    cut = pieces_of(listed(parts, len(file)), 0, limit)
    position = 0
    whole = {str(number): torch.zeros(shape, dtype=torch.int32) for number, (_, shape) in enumerate(parts)}
    for piece in cut:
        assert piece.start == position
        assert piece.bytes > 0
        assert sum(part.end - part.start for part in piece.parts) <= limit
        position = piece.end
        for part in piece.parts:
            assert piece.start <= part.start < part.end <= piece.end
            view = whole[part.name]
            for dimension, (offset, size) in enumerate(zip(part.box.offsets, part.box.sizes)):
                view = view.narrow(dimension, offset, size)
            data = torch.frombuffer(bytearray(file[part.start:part.end]), dtype=torch.int32)
            view.copy_(data.view(part.box.sizes))
    assert position == len(file)
    for number, (start, _) in enumerate(parts):
        values = whole[str(number)]
        assert values.numpy().tobytes() == bytes(file[start:start + 4 * values.numel()])


def test_parts_that_overlap_cannot_be_cut():
    with pytest.raises(OverlappingParts):
        pieces_of(listed([(0, (4,)), (8, (4,))], 24), 0)


@given(st.integers(1, 12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_each_rank_that_needs_a_piece_gets_it_once_and_each_node_too(ranks: int, nodes: int, rng: random.Random):
    names = [f"node {rng.randrange(nodes)}" for _ in range(ranks)]
    needs: list[Needs] = [{file: ranges_of(sorted(rng.sample(range(4), rng.randint(1, 4)))) for file in range(3)
                           if rng.random() < 0.6} for _ in range(ranks)]
    for scope in ("all", "node"):
        streams = plan([10, 20, 5], needs, names, scope)
        readers = [(stream.file, names[stream.reader] if scope == "node" else "") for stream in streams]
        assert len(set(readers)) == len(readers), "a file is read once in each group"
        assert {stream.file for stream in streams} == {0, 1, 2}, "every hash is compared"
        arrived: list[tuple[int, int, int]] = []
        for stream in streams:
            for piece in range(4):
                receivers = stream.receivers(piece)
                members = {stream.reader, *receivers}
                hops = {rank: hop(rank, stream.reader, receivers, names) for rank in members}
                assert hops[stream.reader].source is None
                sent = [(source, target) for source in members for target in hops[source].targets]
                assert sorted(target for _, target in sent) == sorted(receivers)
                assert all(hops[target].source == source for source, target in sent)
                across = [names[target] for source, target in sent if names[source] != names[target]]
                assert len(set(across)) == len(across), "a node gets a piece once"
                arrived += [(rank, stream.file, piece) for rank in members if covers(
                    stream.needed_by.get(rank, ()), piece)]
        wanted = [(rank, file, piece) for rank in range(ranks) for file, ranges in needs[rank].items()
                  for piece in range(4) if covers(ranges, piece)]
        assert sorted(arrived) == sorted(wanted)


def test_a_rank_reads_only_a_few_pieces_ahead():
    started: list[int] = []
    items = [shared_reading._Item(number, 0) for number in range(40)]
    ahead = shared_reading._ReadAhead(lambda item: started.append(item.piece) or torch.empty(0), items)
    for number in range(len(items)):
        ahead.next()
        assert len(started) <= number + 1 + shared_reading.AHEAD
    ahead.close()
    assert sorted(started) == list(range(40))
    assert pieces.PIECE_BYTES * (shared_reading.AHEAD + 2) <= 128 << 20


