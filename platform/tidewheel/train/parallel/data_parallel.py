"""Data parallelism: who sums gradients and who keeps optimizer state. Gradients are SUMMED over ranks, never averaged:
the step divides once by the global number of targets.

Each class here is one way for one part of a model (a whole decoder or a pipeline stage):

- `Alone`: one data-parallel rank, nothing to do.
- `Replicated` (ddp): every rank has everything; gradients are all-reduced in buckets while the backward pass goes on.
- `ShardedOptimizer` (zero1): as above, and each rank updates its share of the rows of every parameter.
- `FullyShard` (zero2, zero3, HSDP): FSDP2.

In reproducible mode a `GradientOrder` is given, and gradients are added up by `reproducible.exchange` in the place of
collectives that add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tidewheel.train.parallel.tensor import complete_gradients
from tidewheel.train.reproducible.exchange import OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder

BUCKET_BYTES = 25 * 2**20
"""Gradients travel in pieces of about this size, as in torch's DistributedDataParallel."""

Named = list[tuple[str, nn.Parameter]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Alone:
    """A part that no other data-parallel rank shares."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def named_parameters(self) -> Named:
        """The parameters as the optimizer and checkpoints see them."""
        return list(self.part.named_parameters())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.part.zero_grad(set_to_none=True)

    def begin(self, number: int, count: int) -> None:
        """The forward and backward pass of micro-batch `number` of `count` follows; after the last one gradients may be
        reduced."""

    def done(self, number: int, count: int) -> None:
        """That backward pass is over. In a pipeline `begin` is never called, `done` for each micro-batch in turn."""

    def finish(self) -> None:
        """All backward passes of the step are done: gradients are summed when this returns."""
        complete_gradients(self.part.parameters())

    def refresh(self) -> None:
        """What `named_parameters` gives has changed: the forward pass must see it."""

    def reshard(self) -> None:
        """Give up what a forward pass without a backward pass has gathered."""


class Replicated(Alone):
    """Every rank holds all parameters; their gradients, in fp32, are all-reduced once per step.

    Args:
        part: a decoder or a stage.
        mesh: the ranks, in one dimension; None in reproducible mode on a single rank.
        sums: reproducible mode: makes what adds up the gradients of a bucket.
        order: reproducible mode.
    """

    def __init__(self, part: nn.Module, mesh: DeviceMesh | None, *, order: GradientOrder | None = None,
                 sums: Callable[[], OrderedSum] | None = None) -> None:
        super().__init__(part)
        self._group = mesh.get_group() if mesh is not None else None
        # backward comes to the last layers first
        self._buckets = _buckets(reversed(list(part.parameters())))
        self._order, self._sums = order, [sums() for _ in self._buckets] if sums is not None else []
        self._armed = False
        self._missing: list[int] = []
        self._flying: list[tuple[torch.Tensor, Any]] = []
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def begin(self, number: int, count: int) -> None:
        self._armed, self._missing = number == count - 1, [len(bucket) for bucket in self._buckets]

    def _ready(self, number: int) -> None:
        """One more gradient of bucket `number` is whole. Buckets leave in order: the same order on every rank."""
        if self._armed and self._order is None:
            self._missing[number] -= 1
            while len(self._flying) < len(self._buckets) and self._missing[len(self._flying)] == 0:
                self._send()

    def _send(self) -> None:
        flat = self._flat(self._buckets[len(self._flying)])
        self._flying.append((flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def _flat(self, bucket: list[nn.Parameter]) -> torch.Tensor:
        return torch.cat([local(_gradient(p)).reshape(-1) for p in bucket]).float()

    def done(self, number: int, count: int) -> None:
        if self._order is None:
            return
        # autograd would add the gradients of micro-batches in the order of their computation
        self._order.begin(number, count)
        complete_gradients(self.part.parameters())
        for bucket, total in zip(self._buckets, self._sums):
            total.add(self._flat(bucket))
        if not self._order.last:
            self.part.zero_grad(set_to_none=True)

    def _reduced(self) -> Iterator[torch.Tensor]:
        """The summed gradients of each bucket, flat."""
        yield from (total.whole() for total in self._sums)
        while self._order is None and len(self._flying) < len(self._buckets):
            self._send()
        for flat, work in self._flying:
            work.wait()
            yield flat

    def finish(self) -> None:
        for bucket, flat in zip(self._buckets, self._reduced()):
            gradients = [local(_gradient(p)) for p in bucket]
            pieces = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients)])
        self._flying, self._armed = [], False
        super().finish()


class ShardedOptimizer(Replicated):
    """ZeRO stage 1 (https://arxiv.org/abs/1910.02054): a rank's optimizer knows its rows of every parameter only.

    The rows are DTensors over the memory of the whole parameters, so that an update writes into these; an all-gather
    then brings the other ranks' rows. They are cut as FSDP2 cuts: checkpoints of one suit the other.
    """

    def __init__(self, part: nn.Module, mesh: DeviceMesh, *, order: GradientOrder | None = None,
                 sums: Callable[[], OrderedSum] | None = None) -> None:
        super().__init__(part, mesh, order=order, sums=sums)
        self.mesh = mesh
        self._rows = [(name, nn.Parameter(_place(parameter.detach(), mesh))) for name, parameter in
                      part.named_parameters()]

    def named_parameters(self) -> Named:
        return self._rows

    def zero_grad(self) -> None:
        super().zero_grad()
        for _, rows in self._rows:
            rows.grad = None

    def finish(self) -> None:
        super().finish()
        for (_, rows), parameter in zip(self._rows, self.part.parameters()):
            assert isinstance(rows, DTensor)
            rows.grad = _rows(_gradient(parameter), self.mesh, rows.device_mesh, rows.placements)

    @torch.no_grad()
    def refresh(self) -> None:
        """All-gather the rows, a bucket at a time."""
        ranks = self.mesh.size()
        for bucket in self._buckets:
            shares = [_shares(local(parameter.detach()), ranks) for parameter in bucket]
            sizes = [sum(share[rank].numel() for share in shares) for rank in range(ranks)]
            mine = torch.cat([share[self.mesh.get_local_rank()].reshape(-1) for share in shares])
            everyone = mine.new_empty(ranks, max(sizes)).unbind()
            dist.all_gather(list(everyone), nn.functional.pad(mine, (0, max(sizes) - len(mine))), group=self._group)
            for rank, row in enumerate(everyone):
                targets = [share[rank] for share in shares]
                pieces = row[:sizes[rank]].split([target.numel() for target in targets])
                torch._foreach_copy_(targets, [piece.view_as(t) for piece, t in zip(pieces, targets)])


class FullyShard(Alone):
    """FSDP2: parameters, gradients and optimizer state are sharded by rows; each block is gathered when it is used.

    Args:
        part: with the blocks under `part.blocks`; everything else is one unit.
        mesh: one dimension, or (replicate, shard); in reproducible mode always that of the shards.
        reshard_after_forward: ZeRO-3; False keeps gathered parameters from forward to backward (ZeRO-2).
        reduce_always: gradients are reduce-scattered after every backward pass, not after the last one only.
        offload: what is sharded lies in host memory.
        precision: types of the blocks' gathered parameters and of the reduction; the rest is gathered as it is.
        sums: reproducible mode: makes what adds up the gradients of a unit.
        order: reproducible mode.
    """

    def __init__(self, part: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool, reduce_always: bool = False,
                 offload: bool = False, precision: MixedPrecisionPolicy | None = None,
                 order: GradientOrder | None = None, sums: Callable[[], OrderedSum] | None = None) -> None:
        super().__init__(part)
        self._reduce_always, self._order = reduce_always, order
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        for block in blocks(part):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=policy,
                        mp_policy=precision or MixedPrecisionPolicy())
        fully_shard(part, mesh=mesh, reshard_after_forward=False, offload_policy=policy,
                    mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        for unit in self._units():  # gloo has no PREMUL_SUM, which other divide factors need
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if order is not None and sums is not None:
                unit.set_custom_reduce_scatter(_OrderedReduceScatter(order, sums()))

    def _units(self) -> Iterator[FSDPModule]:
        return (module for module in self.part.modules() if isinstance(module, FSDPModule))

    def begin(self, number: int, count: int) -> None:
        if self._order is not None:
            self._order.begin(number, count)
            self.zero_grad()  # FSDP2 hands over the gradients of each micro-batch; what it makes of them is the sum's
            return
        assert isinstance(self.part, FSDPModule)
        last = number == count - 1
        self.part.set_requires_gradient_sync(last or self._reduce_always)
        self.part.set_requires_all_reduce(last)

    def reshard(self) -> None:
        """Without a backward pass, after an evaluation, nothing else does, and parameters would be plain tensors that
        neither the optimizer nor a checkpoint knows."""
        for unit in self._units():
            unit.reshard()


class _OrderedReduceScatter(ReduceScatter):
    """What FSDP2 calls in the place of a reduce-scatter, after the backward pass of each micro-batch."""

    def __init__(self, order: GradientOrder, total: OrderedSum) -> None:
        self._order, self._total = order, total

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._total.add(input_tensor)
        if self._order.last:  # before, the output becomes a gradient that `FullyShard.begin` forgets
            output_tensor.copy_(self._total.shard())


def blocks(part: nn.Module) -> list[nn.Module]:
    """The blocks of a decoder or of a stage of one."""
    found = part.blocks
    return list(found.values()) if isinstance(found, nn.ModuleDict) else list(found)  # type: ignore[arg-type]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in pieces of about BUCKET_BYTES, each of one dtype."""
    found: list[list[nn.Parameter]] = []
    room, dtype = 0, None
    for parameter in parameters:
        size = local(parameter).nbytes
        if not found or size > room or parameter.dtype != dtype:
            found.append([])
            room, dtype = BUCKET_BYTES, parameter.dtype
        found[-1].append(parameter)
        room -= size
    return found


def _shares(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """`tensor` cut by rows as DTensor's Shard(0) does: later ranks may get less, or nothing."""
    pieces = list(tensor.chunk(ranks))
    return pieces + [tensor[:0]] * (ranks - len(pieces))


def _place(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a tensor that every rank of `mesh` has; if it is cut over tensor-parallel ranks already, then
    as FSDP2 cuts it further."""
    if not isinstance(tensor, DTensor):
        return _rows(tensor, mesh, mesh, (Shard(0),))
    pieces = math.prod(tensor.device_mesh.size(dim) for dim, placement in enumerate(tensor.placements)
                       if placement.is_shard(0))
    outer = _StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)
    return _rows(tensor, mesh, DeviceMesh._concatenate([mesh, tensor.device_mesh]), (outer, *tensor.placements))


def _rows(tensor: torch.Tensor, mesh: DeviceMesh, grid: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's rows of what it has of `tensor`, sharing its memory, placed so on `grid`."""
    mine = _shares(local(tensor), mesh.size())[mesh.get_local_rank()]
    return DTensor.from_local(mine, grid, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
