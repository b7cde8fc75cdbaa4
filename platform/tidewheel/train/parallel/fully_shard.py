"""Data parallelism by FSDP2: zero2, zero3 and HSDP.

A unit is what one all-gather brings: the embedding, each block, and the final norm with the output matrix. With tied
embeddings the embedding is used at both ends, so it forms one unit with the final norm, which is gathered once per
forward pass and stays until the backward pass ends. A pipeline stage has some of these units. With expert parallelism
the experts of a block are a unit inside the block's, over the ranks that hold the same experts.

The gather of the next units (`parallel.prefetch`) starts before a unit computes, in both directions. The embedding is
not gathered for the backward pass, which does not read it. The unit with the output matrix is not resharded after the
forward pass, because the backward pass begins with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tidewheel.models.decoder import Decoder
from tidewheel.models.moe.experts import Experts
from tidewheel.models.wrapped import Wrapped
from tidewheel.train import fp8
from tidewheel.train.metrics.waits import Waits, measured
from tidewheel.train.optim.overlapped import OverlappedUpdate
from tidewheel.train.parallel.data_parallel import SingleProcess, accumulate_in_fp32, blocks, local, trainable
from tidewheel.train.parallel.expert import ShardedExperts, placement
from tidewheel.train.parallel.expert_reduce import reduce_by_source
from tidewheel.train.parallel.ordered_reduce import OrderedReduceScatter
from tidewheel.train.parallel.tensor import complete_gradients
from tidewheel.train.reproducible.exchange import OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the first name since torch 2.13


@dataclass(frozen=True)
class _Unit:
    """Modules that are gathered together.

    Args:
        modules: whose parameters form the unit. The first one's forward pass gathers them.
        is_end: whether the unit holds the embedding or the output matrix.
        inside: units of modules inside this unit's, which are not part of it.
    """

    modules: tuple[nn.Module, ...]
    is_end: bool = False
    inside: tuple[_Unit, ...] = ()

    @property
    def gathered(self) -> list[FSDPModule]:
        """Return the modules to prefetch for this unit's forward or backward pass; call it after sharding."""
        return [self.fsdp, *(unit.fsdp for unit in self.inside)]

    @property
    def fsdp(self) -> FSDPModule:
        """Return the module that has FSDP2's methods; call it after sharding."""
        return cast(FSDPModule, self.modules[0])

    @property
    def group(self) -> Any:
        """Return FSDP2's group of the unit's parameters."""
        return self.fsdp._get_fsdp_state()._fsdp_param_group


class FullyShard(SingleProcess):
    """FSDP2: parameters, gradients and optimizer state are sharded by rows. Each unit is gathered when it is used.

    Args:
        part: a decoder or a pipeline stage.
        mesh: one-dimensional, or (replicate, shard). In reproducible mode it has only the shards.
        reshard_after_forward: True for ZeRO-3; False keeps gathered parameters until the backward pass (ZeRO-2).
        reduce_always: reduce-scatter gradients after every backward pass, not only after the last one.
        prefetch: units that are gathered ahead of the one that computes.
        offload: keep shards in host memory.
        precision: dtypes of the gathered parameters and of the reduction.
        order: of reproducible mode.
        sums: of reproducible mode, creates the sum of a unit's gradients.
        experts: how experts are sharded, with expert parallelism.
    """

    def __init__(self, part: Decoder, mesh: DeviceMesh, *, reshard_after_forward: bool, reduce_always: bool = False,
                 prefetch: int = 1, offload: bool = False, precision: MixedPrecisionPolicy | None = None,
                 order: GradientOrder | None = None, sums: Callable[[], OrderedSum] | None = None,
                 experts: ShardedExperts | None = None) -> None:
        super().__init__(part)
        self.traffic = None
        self._reduce_always, self._order = reduce_always, order
        # FSDP2 of one rank has no reduction to replace: micro-batches are added here in their order
        self._alone = [] if order is None or sums is None or mesh.size() > 1 else [sums() for _ in trainable(part)]
        self._is_prepared = False
        self._is_last = False
        self._in_fp8 = fp8.gathers_in_fp8(part)
        precision = precision or MixedPrecisionPolicy()
        if part.embedding is not None and precision.param_dtype is not None:
            part.embedding.output_dtype = part.embedding.weight.dtype  # the dtype of the residual stream stays
        outer = _shard(part, mesh, precision, reshard_after_forward, offload, experts, prefetch)
        inside = [unit for whole in outer for unit in whole.inside]
        self._units = [*outer, *inside]
        for unit in self._units:  # gloo has no PREMUL_SUM, which other divide factors need
            unit.fsdp.set_gradient_divide_factor(1.0)
            unit.fsdp.set_force_sum_reduction_for_comms(True)
            if order is not None and sums is not None:
                if unit in inside and experts is not None:
                    reduce_by_source(unit.fsdp, order, experts)
                else:
                    unit.fsdp.set_custom_reduce_scatter(OrderedReduceScatter(order, sums()))
            elif precision.reduce_dtype not in (None, torch.float32):
                unit.fsdp.set_custom_reduce_scatter(_LowReduceScatter(precision.reduce_dtype))

    def zero_grad(self) -> None:
        if not self._is_prepared:
            self._keep_gradients_in_fp32()
            self._is_prepared = True
        super().zero_grad()

    def _keep_gradients_in_fp32(self) -> None:
        """Let FSDP2 keep some gradients in fp32, before and after their reduction.

        These are the gradients of 16-bit parameters, and of the embedding and the output matrix, to which many tokens
        or chunks of the loss add. FSDP2 has no option for it: it adds up the uses of a gathered parameter in that
        parameter's dtype, and rounds the reduced gradient to the dtype of the parameter.

        Called before the first forward pass, when the parameters have their final storage.
        """
        self.part._get_fsdp_state()._lazy_init()  # type: ignore[operator]
        for unit in self._units:
            group = unit.group
            if not any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params):
                continue  # frozen
            if group._orig_dtype == torch.float32 and not (unit.is_end and group.mp_policy.param_dtype is not None):
                continue
            unit.fsdp.unshard()  # makes the gathered parameters, which FSDP2 uses from now on, and sets dtypes
            accumulate_in_fp32(parameter.unsharded_param for parameter in group.fsdp_params)
            unit.fsdp.reshard()
            group._orig_dtype = torch.float32
        accumulate_in_fp32(self.part.parameters())

    def begin(self, number: int, count: int) -> None:
        if self._order is not None:
            self._order.begin(number, count)
            self.zero_grad()  # the `OrderedSum` holds the sum; FSDP2 must not accumulate on its own
            return
        assert isinstance(self.part, FSDPModule)
        last = self._is_last = number == count - 1
        self.part.set_requires_gradient_sync(last or self._reduce_always)
        self.part.set_requires_all_reduce(last)

    def done(self, number: int, count: int) -> None:
        if not self._alone:
            return
        complete_gradients(self.part.parameters())
        for gradient, total in zip(self._gradients(), self._alone):
            total.add(gradient.reshape(-1))
        if number < count - 1:
            super().zero_grad()

    def finish(self) -> None:
        for gradient, total in zip(self._gradients(), self._alone):
            gradient.copy_(total.whole().view_as(gradient))
        super().finish()

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of the gradient of each trainable parameter."""
        for _, parameter in trainable(self.part):
            assert parameter.grad is not None
            yield local(parameter.grad)

    def measure(self, waits: Waits) -> None:
        for group in filter(None, (unit.group for unit in self._units)):
            group.wait_for_unshard = measured(group.wait_for_unshard, waits)  # with the copy out of the buffer
            group.finalize_backward = measured(group.finalize_backward, waits)

    def announce(self, to: OverlappedUpdate) -> None:
        """Tell when the gradients of a unit are final; see `overlapped.Announces`."""
        for unit in self._units:
            if unit.group is not None:
                unit.group.post_backward = self._announcing(unit.group, to)

    def _announcing(self, group: Any, to: OverlappedUpdate) -> Callable[..., None]:
        plain = group.post_backward

        def post_backward(*unused: Any) -> None:
            plain(*unused)
            if self._is_last:
                events = [held.grad_offload_event for held in group.fsdp_params if held.grad_offload_event is not None]
                to.ready([held.sharded_param for held in group.fsdp_params], events)

        return post_backward

    def refresh(self) -> None:
        """Compute the scales of the weights that are gathered in fp8."""
        if self._in_fp8:
            fp8.update_scales(self.part)

    def reshard(self) -> None:
        """Shard the parameters again after a forward pass without a backward pass.

        Otherwise parameters stay plain tensors, which neither the optimizer nor a checkpoint knows.
        """
        for unit in self._units:
            unit.fsdp.reshard()


def _shard(part: Decoder, mesh: DeviceMesh, precision: MixedPrecisionPolicy, reshard_after_forward: bool,
           offload: bool, experts: ShardedExperts | None, prefetch: int) -> list[_Unit]:
    """Shard a part of the model and return its units in the order of the forward pass."""
    fsdp_precision = precision
    if precision.reduce_dtype is not None:  # gradients are accumulated in fp32, `_LowReduceScatter` rounds them
        fsdp_precision = dataclasses.replace(precision, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": fsdp_precision, "offload_policy": OffloadPolicy()}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    inner = [_Unit((block,), inside=_expert_units(block, experts)) for block in blocks(part)]
    for unit in inner:
        for nested in unit.inside:
            assert experts is not None
            fully_shard(nested.modules[0], reshard_after_forward=reshard_after_forward,
                        shard_placement_fn=placement(experts.mesh), **{**settings, "mesh": experts.mesh})
        fully_shard(unit.modules[0], reshard_after_forward=reshard_after_forward, shard_placement_fn=placement(mesh),
                    **settings)
        for nested in unit.inside:
            _gather_with(nested, unit.modules[0])
    tied = isinstance(part, Wrapped) or (part.embedding is not None and part.norm is not None and part.output is None)
    first, last = [], []
    if tied:
        first = [_Unit((part,), is_end=True)]
    if part.embedding is not None and not tied:
        first = [_Unit((part.embedding,), is_end=True)]
        fully_shard(part.embedding, reshard_after_forward=reshard_after_forward, **settings)
        if not any(True for _ in part.embedding.children()):  # the backward pass of an adapter reads it
            part.embedding.set_unshard_in_backward(False)  # type: ignore[operator]
    if part.norm is not None and part.output is not None:
        end = (part.norm, part.output, *(() if part.value_head is None else (part.value_head,)))
        last = [_Unit(end, is_end=True)]
        fully_shard(list(end), reshard_after_forward=False, **settings)
        _gather_with(last[0], part.norm)
    fully_shard(part, reshard_after_forward=False, **settings)  # without parameters, unless embeddings are tied
    units = [*first, *inner, *last]
    _prefetch(part, units, inner, prefetch)
    return units


def _expert_units(block: nn.Module, experts: ShardedExperts | None) -> tuple[_Unit, ...]:
    if experts is None:
        return ()
    return tuple(_Unit((module,)) for module in block.modules() if isinstance(module, Experts))


def _gather_with(unit: _Unit, module: nn.Module) -> None:
    """Let the forward pass of one module gather a unit, and its end reshard it.

    Otherwise FSDP2 waits until every module of a unit has run once. But a loss in chunks reads the output matrix and
    never calls its module, and an objective may call it several times. All reads come after the first module. Experts
    are gathered with their block, so outside of a forward pass that is compiled or recomputed.
    """
    state = unit.fsdp._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = module.register_forward_pre_hook(state._pre_forward, prepend=True,
                                                                      with_kwargs=True)
    state._post_forward_hook_handle = module.register_forward_hook(state._post_forward)


def _prefetch(part: nn.Module, units: Sequence[_Unit], inner: Sequence[_Unit], depth: int) -> None:
    """Set which units are gathered while another one computes: the next `depth` of them."""
    for index, unit in enumerate(units[:-1]):
        unit.fsdp.set_modules_to_forward_prefetch(_gathered(units[index + 1:index + 1 + depth]))
    backwards = inner[::-1]
    for index, unit in enumerate(backwards[:-1]):
        unit.fsdp.set_modules_to_backward_prefetch(_gathered(backwards[index + 1:index + 1 + depth]))
    if inner:  # the backward pass of the loss begins at the root, whose unit or the last one is still gathered
        cast(FSDPModule, part).set_modules_to_backward_prefetch(_gathered(backwards[:depth]))


def _gathered(units: Sequence[_Unit]) -> list[FSDPModule]:
    return [module for unit in units for module in unit.gathered]


class _LowReduceScatter(ReduceScatter):
    """Reduce-scatter of gradients in a 16-bit dtype. FSDP2 also all-reduces the result, of HSDP, in it.

    With `MixedPrecisionPolicy.reduce_dtype`, FSDP2 would also add up the micro-batches in this dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=self._dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any,
                 async_op: bool = False) -> Any:
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
