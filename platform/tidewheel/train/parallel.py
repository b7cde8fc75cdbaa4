"""A decoder spread over the ranks: FSDP2 on a one-dimensional mesh, with initial weights that know no world size."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tidewheel.models.config import ModelConfig
from tidewheel.models.decoder import Decoder, init_parameter
from tidewheel.train.runtime import Runtime

KEEP_PARAMETERS = 100_000_000
"""A smaller model keeps its gathered weights from forward to backward: one all-gather less, and memory to spare."""


def build(config: ModelConfig, vocabulary_size: int, runtime: Runtime) -> Decoder:
    """The decoder on `runtime.device`, fp32, its values not yet set.

    With more than one rank each block and the root are FSDP units whose gradients are SUMMED over ranks, not averaged:
    the step divides once by the global token count.
    """
    with torch.device("meta"):
        model = Decoder(config, vocabulary_size)
    if runtime.world_size > 1:
        mesh = _mesh(runtime)
        large = sum(parameter.numel() for parameter in model.parameters()) > KEEP_PARAMETERS
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=large)
        fully_shard(model, mesh=mesh)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):  # gloo has no PREMUL_SUM, which other divide factors need
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
    return model.to_empty(device=runtime.device)


def _mesh(runtime: Runtime) -> DeviceMesh:
    kind = torch.device(runtime.device).type
    if runtime.process_group is not None:
        return DeviceMesh.from_group(runtime.process_group, kind)
    return init_device_mesh(kind, (runtime.world_size,))


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Set every parameter to its initial value, whole on CPU one at a time, each rank keeping its shard."""
    for name, parameter in model.named_parameters():
        value = init_parameter(name, parameter.shape, model.config, seed)
        if isinstance(parameter, DTensor):
            shard = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements,
                                      src_data_rank=None)  # every rank has the value: nothing to send
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(value)


def reshard(model: nn.Module) -> None:
    """Give up gathered weights. Without a backward pass, after an evaluation, nothing else does, and parameters would
    be plain tensors that neither the optimizer nor a checkpoint knows."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass reduces gradients over ranks; no effect on an unsharded model."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
