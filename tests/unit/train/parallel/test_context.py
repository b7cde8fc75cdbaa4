"""Tests of context parallelism: how rows are divided, and each method of exchange against one process."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.every import every
from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import assert_same_training, config, micro_batches
from tidewheel.models.attention import document_attention, document_mask
from tidewheel.models.blocks import Attention, Block, SwiGLU
from tidewheel.models.blockwise import Blockwise, Scores, key_intervals
from tidewheel.models.decoder import IGNORED
from tidewheel.models.documents import Documents
from tidewheel.models.families.llama import Llama
from tidewheel.train.parallel import partition
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.context import RowShare
from tidewheel.train.parallel.ring import Ring

METHODS = ("all_gather", "all_to_all", "ring")


def lognormal_row(length: int, seed: int, mean: float = 4.0) -> np.ndarray:
    """Return where the document of each position begins, [1, length], for documents of log-normal lengths."""
    sizes = np.random.default_rng(seed).lognormal(mean, 1.5, length).astype(np.int64) + 1
    ends = np.cumsum(sizes)
    offsets = np.concatenate(([0], ends[ends < length], [length]))
    return partition.starts_of(offsets, 1, length)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 50), st.sampled_from([None, 7]))
def test_every_position_is_kept_once_and_balance_never_loses(size: int, chunk: int, seed: int, window: int | None):
    length = 2 * size * chunk
    costs = partition.visible_keys(lognormal_row(length, seed), [window, None])
    for balance in ("documents", "zigzag"):
        divided = partition.divide(costs, size, balance)
        assert np.array_equal(np.sort(divided.ravel()), np.arange(length)), "each position once"
        assert (np.diff(divided, axis=-1) > 0).all(), "rising"
    before, after = (partition.imbalance(costs, partition.divide(costs, size, balance))
                     for balance in ("zigzag", "documents"))
    assert after <= max(before, partition.EVEN) + 1e-9


@every([4, 8, 16])
def test_packed_documents_cost_every_rank_the_same(size: int):
    costs = np.concatenate([partition.visible_keys(lognormal_row(32768, seed, 7.0), [None]) for seed in range(4)])
    before = partition.imbalance(costs, partition.divide(costs, size, "zigzag"))
    after = partition.imbalance(costs, partition.divide(costs, size))
    assert before > 1.1, before
    assert after < 1.02, after


def test_rows_of_one_document_and_windows_keep_long_pieces():
    whole, length = np.zeros((1, 4096), dtype=np.int64), 4096
    zigzag = partition.zigzag(length, 4)
    assert np.array_equal(partition.divide(partition.visible_keys(whole, [None]), 4)[:, 0], zigzag)
    near = partition.divide(partition.visible_keys(whole, [64]), 4)
    assert np.array_equal(near[:, 0], partition.contiguous(length, 4))
    assert partition.hops(near, whole, 64) == 2, "keys need not travel further than the next rank"
    assert partition.hops(near, whole, None) == 4


@every([1, 2, 4])
def test_shares_partition_the_micro_batch(size: int):
    micro = micro_batches(0)[0]
    shares = [RowShare(rank, size, ParallelConfig(context=size)).of(micro) for rank in range(size)]
    assert sum(int((part.targets != IGNORED).sum()) for part in shares) == micro.num_targets
    for rank, part in enumerate(shares):
        kept = slice(None) if size == 1 else part.documents.places[rank]
        rows = torch.arange(len(micro.tokens))[:, None]
        assert torch.equal(part.targets, micro.targets[rows, kept].view_as(part.targets)), "made before the cut"
        assert torch.equal(part.positions, micro.positions[rows, kept].view_as(part.positions)), "of the document"
        assert torch.equal(part.segment_ids, micro.segment_ids), "whole: keys are"


def test_starts_of_documents_come_from_the_layout_of_the_batch():
    segments = micro_batches(0)[0].segment_ids
    starts = partition.starts_of(Documents.of(segments).on_host, *segments.shape)
    for row, of_row in zip(segments.tolist(), starts.tolist()):
        assert of_row == [next(i for i in range(p + 1) if len(set(row[i:p + 1])) == 1) for p in range(len(row))]


class Windowed(Llama):
    """A family with everything that attention may have: windows, soft-capping and sinks."""

    def window(self, layer: int) -> int | None:
        return 6 if layer % 2 else None

    def block(self, layer: int) -> Block:
        attention = Attention(self, qk_norm=True, soft_cap=3.0, sinks=True, scale=0.4)
        return Block(self, attention, SwiGLU(self.dim, self.ffn_width))

    @property
    def plain_attention(self) -> bool:
        return False


def test_every_method_gives_the_result_of_one_process():
    on_ranks(4, _train_all)


def _train_all() -> None:
    windows = {"model": {"kind": f"{__name__}:Windowed", "num_kv_heads": 2}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({"context": 4, "context_method": method}, windows) for method in METHODS),
        ({"context": 2, "tensor": 2, "context_method": "all_to_all"}, {"model": {"num_kv_heads": 2}}),
        ({"context": 2, "pipeline": 2, "context_method": "ring"}, {"memory": {"activation_checkpointing": "full"}}),
        ({"context": 2, "data": "zero3", "context_method": "ring"}, {"memory": {
            "activation_checkpointing": "selective"}})]
    for layout, changes in cases:
        assert_same_training(config(layout, **changes), steps=1)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer in self._known or not size:
            return
        self._known.add(pointer)
        self.now += size
        self.most = max(self.most, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._freed, pointer, size)

    def _freed(self, pointer: int, size: int) -> None:
        self._known.discard(pointer)
        self.now -= size


def test_a_ring_never_holds_the_keys_of_a_row():
    on_ranks(4, _ring_memory)


def _ring_memory() -> None:
    rank, length, width = dist.get_rank(), 4096, 64
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, width, generator=generator) for _ in range(3))
    grad = torch.randn(1, 1, length, width, generator=generator)
    segments = torch.arange(length)[None] // 1500
    places = torch.from_numpy(partition.zigzag(length, 4))[:, None]
    own = places[rank][0]
    pieces = [Blockwise(key_intervals(segments, places[rank], places[(rank - hops) % 4])) for hops in range(4)]
    scores = Scores(width ** -0.5)
    mine = [x[:, :, own].contiguous() for x in (q, k, v, grad)]
    peaks = {}
    for hops in (3, 4):  # with two, no keys travel while gradients do
        ring = Ring(pieces[:hops], dist.group.WORLD, rank, 4)
        with LiveBytes() as live:
            out, lse = ring.forward(*mine[:3], scores)
            gradients = ring.backward(mine[3], *mine[:3], lse, (out * mine[3]).sum(dim=-1), scores)
        assert live.largest <= 2 * length // 4 * width * 4, "no tensor is larger than the keys and values of one rank"
        peaks[hops] = live.most
    assert peaks[4] <= 1.02 * peaks[3], f"memory grows with the number of pieces: {peaks}"
    for x in (q, k, v):
        x.requires_grad_()
    whole = document_attention(q, k, v, document_mask(segments))
    torch.testing.assert_close(out, whole.detach()[:, :, own], atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(gradients, torch.autograd.grad(whole, (q, k, v), grad)):
        torch.testing.assert_close(ours, theirs[:, :, own], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("values", "words"), [
    ({"model.num_heads": 4, "model.num_kv_heads": 4, "parallel.context": 3}, "context 2, or context_method all_gather"),
    ({"model.num_heads": 12, "model.dim": 96, "model.num_kv_heads": 6, "parallel.context": 4},
     "nearest legal choice: context 3"),
])
def test_heads_that_ranks_cannot_share_are_refused(values: dict[str, int], words: str):
    from tidewheel.config import build
    from tidewheel.errors import ConfigError
    from tidewheel.train.config import TrainConfig

    overrides = [f"{key}={value}" for key, value in values.items()]
    with pytest.raises(ConfigError, match=words):
        build(TrainConfig, {"elastic": {"max_workers": 12}}, [*overrides, "parallel.context_method=all_to_all"])
