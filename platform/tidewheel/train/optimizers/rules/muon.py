"""Muon for sharded matrices: one rank gathers each matrix, orthogonalises it and shards it again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from tidewheel.train.optimizers.rules.on_device import groups_to_update, kernel, local
from tidewheel.train.parallel.offloaded import on_mesh, own_part


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` whose parameters may be DTensors; the update is that of the whole matrix.

    The momentum is element-wise and stays sharded. The orthogonalisation needs whole matrices. If a single mesh
    dimension shards them by rows, N matrices of one shape are exchanged at a time, so that each of the N ranks works on
    one; this costs two all-to-alls of a matrix's size. Otherwise (tensor parallelism) every rank gathers every matrix.

    A parameter [E, F, D] is a stack of E matrices, each orthogonalised by itself. Ranks that have whole matrices of it
    exchange nothing.

    Args:
        params: parameters or parameter groups.
        fused: take the gradient's scale and whether to update on the device, see `on_device`.
        settings: of `torch.optim.Muon`.
    """

    def __init__(self, params: Any, *, fused: bool = False, **settings: Any) -> None:
        groups = [dict(group) for group in params]
        flat = [{**group, "params": [p for p in group["params"] if p.ndim == 2]} for group in groups]
        super().__init__([group for group in flat if group["params"]] or flat[:1], **settings)
        for group in groups:  # torch's constructor refuses stacks
            if stacks := [parameter for parameter in group["params"] if parameter.ndim == 3]:
                self.add_param_group({**group, "params": stacks})
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        own = any(isinstance(parameter, DTensor) or parameter.ndim == 3
                  for group in self.param_groups for parameter in group["params"])
        if not (own or self._step_supports_amp_scaling):
            super().step(closure)
            return
        assert closure is None
        for group, held, scale, skip in groups_to_update(self):
            updates = [self._momentum(parameter, group, scale, skip) for parameter in held]
            function = partial(orthogonalise, ns_coefficients=group["ns_coefficients"],
                               ns_steps=group["ns_steps"], eps=group["eps"])
            for parameter, update in zip(held, _orthogonalised(updates, function)):
                rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape[-2:])
                weight = local(parameter)
                if self._step_supports_amp_scaling:
                    _move(weight, update, skip, torch.tensor(rate, dtype=torch.float32),
                          torch.tensor(group["lr"] * group["weight_decay"], dtype=torch.float32))
                    continue
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-rate)

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any], scale: torch.Tensor,
                  skip: torch.Tensor) -> torch.Tensor:
        """Return the update before orthogonalisation, sharded like the parameter."""
        if "momentum_buffer" not in self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, momentum = parameter.grad, self.state[parameter]["momentum_buffer"]
        assert gradient is not None
        if self._step_supports_amp_scaling:
            update = torch.empty_like(momentum)
            _accumulate(local(momentum), local(gradient), local(update), scale, skip, group["momentum"],
                        group["nesterov"])
            return update
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


@kernel()
def _accumulate(momentum: torch.Tensor, gradient: torch.Tensor, update: torch.Tensor, scale: torch.Tensor,
                skip: torch.Tensor, decay: float, nesterov: bool) -> None:
    """Add a gradient to the momentum of one matrix, and write the update before orthogonalisation."""
    gradient = gradient / scale
    accumulated = momentum.lerp(gradient, 1 - decay)
    update.copy_(gradient.lerp(accumulated, decay) if nesterov else accumulated)
    momentum.copy_(torch.where(skip, momentum, accumulated))


@kernel()
def _move(weight: torch.Tensor, update: torch.Tensor, skip: torch.Tensor, rate: torch.Tensor,
          decay: torch.Tensor) -> None:
    """Decay one matrix and subtract the orthogonalised update, which is bf16; the rates are scalars on the host."""
    weight.copy_(torch.where(skip, weight, weight * (1 - decay) - rate * update.to(weight.dtype)))


Orthogonalise = Callable[[torch.Tensor], torch.Tensor]


def orthogonalise(update: torch.Tensor, *, ns_coefficients: tuple[float, float, float], ns_steps: int,
                  eps: float) -> torch.Tensor:
    """Return the orthogonalised matrix, or each matrix of a stack, in bf16.

    Args:
        update: [F, D] or [E, F, D].
        ns_coefficients: of the Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon).
        ns_steps: number of iterations.
        eps: least norm.
    """
    if update.ndim == 2:
        return _zeropower_via_newtonschulz(update, ns_coefficients, ns_steps, eps)
    a, b, c = ns_coefficients
    matrices = update.bfloat16()
    is_tall = update.shape[1] > update.shape[2]
    if is_tall:
        matrices = matrices.mT
    matrices = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(ns_steps):
        gram = matrices @ matrices.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        matrices = torch.baddbmm(matrices, polynomial, matrices, beta=a)
    return matrices.mT if is_tall else matrices


def _orthogonalised(updates: Sequence[torch.Tensor], function: Orthogonalise) -> list[torch.Tensor]:
    """Return this rank's part of function(whole matrix) for each update."""
    results: dict[int, torch.Tensor] = {}
    exchanged: dict[tuple[DeviceMesh, int, torch.Size], list[int]] = defaultdict(list)
    for number, update in enumerate(updates):
        dimension = _rows_over(update)
        if not isinstance(update, DTensor):
            results[number] = function(update)
        elif update.ndim == 3:
            results[number] = _of_whole_matrices(update, function)
        elif dimension is not None:
            exchanged[update.device_mesh, dimension, update.shape].append(number)
        else:
            results[number] = own_part(function(on_mesh(update).full_tensor()), update)
    for (mesh, dimension, _), numbers in exchanged.items():
        size = mesh.size(dimension)
        for first in range(0, len(numbers), size):
            some = numbers[first:first + size]
            parts = _exchange([updates[number] for number in some], mesh, dimension, function)
            results.update(zip(some, parts))
    return [results[number] for number in range(len(updates))]


def _of_whole_matrices(update: DTensor, function: Orthogonalise) -> torch.Tensor:
    """Return this rank's part of function(stack), which is computed for the experts of which the rank has a part."""
    experts = [placement if placement.is_shard(0) else Replicate() for placement in update.placements]
    gathered = on_mesh(update).redistribute(placements=experts)
    computed = DTensor.from_local(function(gathered.to_local()), update.device_mesh, experts, run_check=False,
                                  shape=update.shape, stride=update.stride())
    return computed.redistribute(placements=update.placements).to_local().to(update.to_local().device)


def _rows_over(update: torch.Tensor) -> int | None:
    """Return the mesh dimension that shards the matrix, if it is the only one and shards by rows."""
    if not isinstance(update, DTensor):
        return None
    cuts = [number for number, placement in enumerate(update.placements) if not placement.is_replicate()]
    plain = len(cuts) == 1 and type(update.placements[cuts[0]]) is Shard and update.placements[cuts[0]].is_shard(0)
    return cuts[0] if plain else None


def _exchange(updates: Sequence[torch.Tensor], mesh: DeviceMesh, dimension: int, function: Orthogonalise,
              ) -> list[torch.Tensor]:
    """Compute function(matrix i) on rank i; there are at most as many matrices, of one shape, as ranks.

    Rows are padded to the same number on every rank, because an all-to-all moves equal parts.
    """
    group, size, rank = mesh.get_group(dimension), mesh.size(dimension), mesh.get_local_rank(dimension)
    rows, columns = updates[0].shape
    chunk = -(-rows // size)
    mine = [update.to_local() for update in updates if isinstance(update, DTensor)]
    send = mine[0].new_zeros(size, chunk, columns, device=mesh.device_type)
    for row, part in zip(send, mine):
        row[:len(part)].copy_(part)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    back = torch.zeros_like(send)
    if rank < len(updates):  # torch shards like chunk(), so all padding is at the end
        back.view(-1, columns)[:rows].copy_(function(received.view(-1, columns)[:rows]))
    dist.all_to_all_single(received, back, group=group)
    return [received[number, :len(part)].to(part.device) for number, part in enumerate(mine)]
