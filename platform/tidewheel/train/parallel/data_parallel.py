"""Data parallelism: how gradients are summed and where optimizer state is kept.

Gradients are summed over ranks, never averaged. The step divides once, by the global number of targets. They are fp32,
also those of bf16 parameters: a sum of many micro-batches in bf16 loses the small ones. `parallel.reduce_dtype` is the
dtype of the sum over ranks alone.

Each class implements one kind of data parallelism for one part of a model (a whole decoder or a pipeline stage):

- `SingleProcess`: one data-parallel rank, nothing to reduce.
- `Replicated` (ddp): every rank holds all parameters; gradients are all-reduced in buckets during the backward pass.
- `ShardedOptimizer` (zero1): as above, and each rank updates its rows of every parameter.
- `FullyShard` (zero2, zero3, HSDP): FSDP2, in `fully_shard.py`.

In reproducible mode they get a `GradientOrder`, and `reproducible.exchange` replaces collectives that add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tidewheel.train.parallel.coded import Coded
from tidewheel.train.parallel.tensor import complete_gradients
from tidewheel.train.parallel.traffic import Traffic
from tidewheel.train.reproducible.exchange import OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder

if TYPE_CHECKING:
    from tidewheel.train.metrics.waits import Waits
    from tidewheel.train.optim.overlapped import OverlappedUpdate

Named = list[tuple[str, nn.Parameter]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trainable(part: nn.Module) -> Named:
    """Return (name, parameter) of a part's parameters that are not frozen."""
    return [(name, parameter) for name, parameter in part.named_parameters() if parameter.requires_grad]


def accumulate_in_fp32(parameters: Iterable[torch.Tensor]) -> None:
    """Let autograd convert the gradients of 16-bit parameters to fp32 before it adds them up."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32


class SingleProcess:
    """Data parallelism over one rank, and the interface of the other kinds.

    Args:
        part: a decoder or a pipeline stage.

    Attributes:
        traffic: counts the bytes of gradients that this rank sends; None: FSDP2 sends them.
        coded: the sums of compressed gradients; None: no gradient is compressed.
    """

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.traffic: Traffic | None = Traffic()
        self.coded: Coded | None = None
        accumulate_in_fp32(part.parameters())

    def named_parameters(self) -> Named:
        """Return (name, parameter) of trainable parameters as the optimizer and checkpoints use them."""
        return trainable(self.part)

    def frozen_parameters(self) -> Named:
        """Return (name, parameter) of the others."""
        return [(name, parameter) for name, parameter in self.part.named_parameters() if not parameter.requires_grad]

    def zero_grad(self) -> None:
        """Reset all gradients to None."""
        self.part.zero_grad(set_to_none=True)

    def begin(self, number: int, count: int) -> None:
        """Prepare for the forward and backward pass of a micro-batch. Gradients may be reduced after the last one.

        Args:
            number: index of the micro-batch in the step, from 0.
            count: micro-batches of the step.
        """

    def done(self, number: int, count: int) -> None:
        """Handle the end of a backward pass. A pipeline calls this for each micro-batch, and never calls `begin`.

        Args:
            number: index of the micro-batch in the step, from 0.
            count: micro-batches of the step.
        """

    def finish(self) -> None:
        """Finish the reduction after all backward passes of the step; then gradients are summed over ranks."""
        complete_gradients(self.part.parameters())

    def refresh(self) -> None:
        """Make new values of `named_parameters` visible to the forward pass."""

    def reshard(self) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered."""

    def measure(self, waits: Waits) -> None:
        """Measure from now on how long the device waits for collectives."""

    def announce(self, to: OverlappedUpdate) -> None:
        """Tell when gradients are final, see `overlapped.Announces`. Only FSDP2 offloads, so the others never do."""


class Replicated(SingleProcess):
    """Data parallelism with all parameters on every rank. Gradients are all-reduced once per step.

    Args:
        part: a decoder or a pipeline stage.
        mesh: one-dimensional; None in reproducible mode on a single rank.
        reduce_dtype: of the sum over ranks.
        bucket_bytes: approximate size of a bucket.
        order: of reproducible mode.
        sums: of reproducible mode, creates the sum of a bucket's gradients.
        traffic: counts the bytes that are sent.
        coded: creates the compressed sums of (name, parameter) pairs; None: no gradient is compressed.
    """

    def __init__(self, part: nn.Module, mesh: DeviceMesh | None, *, reduce_dtype: torch.dtype = torch.float32,
                 bucket_bytes: int = 25 * 2**20, order: GradientOrder | None = None,
                 sums: Callable[[], OrderedSum] | None = None, traffic: Traffic | None = None,
                 coded: Callable[[Named], Coded] | None = None) -> None:
        super().__init__(part)
        self._reduce_dtype = reduce_dtype
        self._group = mesh.get_group() if mesh is not None else None
        self._traffic = self.traffic = traffic or Traffic()
        self._waits: Waits | None = None
        self.coded = coded(trainable(part)) if coded is not None else None
        backwards = [parameter for _, parameter in reversed(trainable(part))]  # the backward pass begins with the last
        self._buckets = _buckets(backwards, bucket_bytes, self._compresses)
        self._order = order
        self._sums = [sums() for bucket in self._buckets if not self._compresses(bucket[0])] if sums else []
        self._is_last = False
        self._missing: list[int] = []
        self._in_flight: list[tuple[torch.Tensor | None, Any]] = []
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def measure(self, waits: Waits) -> None:
        self._waits = waits

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._waits is None else self._waits.span()

    def _compresses(self, parameter: nn.Parameter) -> bool:
        return self.coded is not None and self.coded.takes(parameter)

    def begin(self, number: int, count: int) -> None:
        if number == 0 and self.coded is not None:
            self.coded.begin()
        self._is_last = number == count - 1
        self._missing = [len(bucket) for bucket in self._buckets]

    def _ready(self, number: int) -> None:
        """Count a finished gradient of bucket `number`. Buckets are sent in the same order on every rank."""
        if self._is_last and self._order is None:
            self._missing[number] -= 1
            while len(self._in_flight) < len(self._buckets) and self._missing[len(self._in_flight)] == 0:
                self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._in_flight)]
        if self.coded is not None and self._compresses(bucket[0]):
            self.coded.send(bucket)
            self._in_flight.append((None, None))
            return
        flat = self._flat(bucket)
        self._in_flight.append((flat, self._sum(flat)))

    def _sum(self, flat: torch.Tensor) -> Any:
        if self._group is None:
            return None
        return self._traffic.all_reduce(flat, self._group)

    def _flat(self, bucket: list[nn.Parameter]) -> torch.Tensor:
        return torch.cat([local(_gradient(p)).reshape(-1) for p in bucket]).to(self._reduce_dtype)

    def done(self, number: int, count: int) -> None:
        if self._order is None:
            return
        # autograd would add the gradients of micro-batches in the order in which they are computed
        self._order.begin(number, count)
        complete_gradients(self.part.parameters())
        sums = iter(self._sums)
        for bucket in self._buckets:
            if self.coded is not None and self._compresses(bucket[0]):
                self.coded.add(bucket)
            else:
                next(sums).add(self._flat(bucket))
        if not self._order.last:
            self.part.zero_grad(set_to_none=True)

    def _reduced(self) -> Iterator[list[torch.Tensor]]:
        """Yield the summed gradients of each bucket, flat."""
        if self._order is None:
            while len(self._in_flight) < len(self._buckets):
                self._send()
        elif self.coded is not None:
            for bucket in self._buckets:
                if self._compresses(bucket[0]):
                    self.coded.send(bucket)
        totals = iter(self.coded.totals() if self.coded is not None else ())
        sums = iter(self._sums)
        for index, bucket in enumerate(self._buckets):
            if self._compresses(bucket[0]):
                with self._waiting():
                    pieces = next(totals)
                yield pieces
                continue
            if self._order is None:
                flat, work = self._in_flight[index]
                if work is not None:
                    with self._waiting():
                        work.wait()
            else:
                with self._waiting():
                    flat = next(sums).whole()
            assert flat is not None
            yield list(flat.split([parameter.numel() for parameter in map(local, bucket)]))

    def finish(self) -> None:
        for bucket, pieces in zip(self._buckets, self._reduced()):
            gradients = [local(_gradient(p)) for p in bucket]
            torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients)])
        self._in_flight = []
        self._is_last = False
        super().finish()


class ShardedOptimizer(Replicated):
    """ZeRO stage 1 (https://arxiv.org/abs/1910.02054): each rank's optimizer updates its rows of every parameter.

    The rows are DTensors in the memory of the whole parameters, so an update writes into these. An all-gather then
    brings the other ranks' rows. Rows are sharded as FSDP2 does, so either can load the other's checkpoints.

    Args:
        part: a decoder or a pipeline stage.
        mesh: one-dimensional, the ranks.
        reduce_dtype: of the sum over ranks.
        options: see `Replicated`.
    """

    def __init__(self, part: nn.Module, mesh: DeviceMesh, *, reduce_dtype: torch.dtype = torch.float32,
                 **options: Any) -> None:
        super().__init__(part, mesh, reduce_dtype=reduce_dtype, **options)
        self.mesh = mesh
        self._whole = trainable(part)
        self._rows = [(name, nn.Parameter(_shard_rows(parameter.detach(), mesh))) for name, parameter in self._whole]
        accumulate_in_fp32(rows for _, rows in self._rows)

    def named_parameters(self) -> Named:
        return self._rows

    def zero_grad(self) -> None:
        super().zero_grad()
        for _, rows in self._rows:
            rows.grad = None

    def finish(self) -> None:
        super().finish()
        for (_, rows), (_, parameter) in zip(self._rows, self._whole):
            assert isinstance(rows, DTensor)
            rows.grad = _rows(_gradient(parameter), self.mesh, rows.device_mesh, rows.placements)

    @torch.no_grad()
    def refresh(self) -> None:
        """All-gather the rows, one bucket at a time."""
        ranks = self.mesh.size()
        for bucket in self._buckets:
            shares = [_shares(local(parameter.detach()), ranks) for parameter in bucket]
            sizes = [sum(share[rank].numel() for share in shares) for rank in range(ranks)]
            mine = torch.cat([share[self.mesh.get_local_rank()].reshape(-1) for share in shares])
            gathered = mine.new_empty(ranks, max(sizes)).unbind()
            with self._waiting():
                dist.all_gather(list(gathered), nn.functional.pad(mine, (0, max(sizes) - len(mine))), group=self._group)
            for rank, row in enumerate(gathered):
                targets = [share[rank] for share in shares]
                pieces = row[:sizes[rank]].split([target.numel() for target in targets])
                torch._foreach_copy_(targets, [piece.view_as(t) for piece, t in zip(pieces, targets)])


def blocks(part: nn.Module) -> list[nn.Module]:
    """Return the blocks of a decoder or of a pipeline stage."""
    modules = part.blocks
    return list(modules.values()) if isinstance(modules, nn.ModuleDict) else list(modules)  # type: ignore[arg-type]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int,
             compresses: Callable[[nn.Parameter], bool]) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of about `bucket_bytes`, each of one dtype, and compressed or not.

    Args:
        parameters: in the order in which the backward pass finishes their gradients.
        bucket_bytes: size of a bucket.
        compresses: whether a parameter's gradient is compressed.

    Returns:
        the buckets, in the order in which their last gradients are finished.
    """
    last: dict[bool, list[nn.Parameter]] = {}
    room = {True: 0, False: 0}
    buckets: list[list[nn.Parameter]] = []
    order = {parameter: index for index, parameter in enumerate(parameters)}
    for parameter in parameters:
        size, kind = local(parameter).nbytes, compresses(parameter)
        if kind not in last or size > room[kind] or parameter.dtype != last[kind][-1].dtype:
            last[kind] = []
            buckets.append(last[kind])
            room[kind] = bucket_bytes
        last[kind].append(parameter)
        room[kind] -= size
    return sorted(buckets, key=lambda bucket: order[bucket[-1]])


def _shares(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Split rows as DTensor's Shard(0) does: later ranks may get fewer rows, or none."""
    pieces = list(tensor.chunk(ranks))
    return pieces + [tensor[:0]] * (ranks - len(pieces))


def _shard_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this rank's rows of a tensor that every rank of `mesh` has.

    A tensor that is sharded by tensor parallelism is sharded further as FSDP2 does.
    """
    if not isinstance(tensor, DTensor):
        return _rows(tensor, mesh, mesh, (Shard(0),))
    pieces = math.prod(tensor.device_mesh.size(dim) for dim, placement in enumerate(tensor.placements)
                       if placement.is_shard(0))
    outer = _StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)
    return _rows(tensor, mesh, DeviceMesh._concatenate([mesh, tensor.device_mesh]), (outer, *tensor.placements))


def _rows(tensor: torch.Tensor, mesh: DeviceMesh, grid: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return this rank's rows of its part of `tensor` as a DTensor on `grid` that shares the memory."""
    mine = _shares(local(tensor), mesh.size())[mesh.get_local_rank()]
    return DTensor.from_local(mine, grid, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
