"""Whether a tensor-parallel group can overlap its collectives with products (`parallel.async_tensor`).

The operators (`tensor_products.py`) read the other ranks' memory. So the group's ranks must be on one node, and torch
must have kernels for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tidewheel.errors import ConfigError
from tidewheel.train.parallel.tensor_products import OPERATORS

WHERE = "parallel.async_tensor"
NOT_SHARED = "the GPUs of a tensor-parallel group cannot share memory"


def check(group: Any, device: torch.device, node: str) -> None:
    """Check that a group can use symmetric memory, and create it. All ranks of the group call it together.

    Args:
        group: the tensor-parallel process group.
        device: of this rank.
        node: name of this rank's node.

    Raises:
        ConfigError: torch has no kernel for the device, the ranks are on several nodes, or cannot share memory.
    """
    if (reason := reason_against(device)) is not None:
        raise ConfigError(reason, where=WHERE, fix="set it to false")
    nodes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(nodes, node, group=group)
    if len(set(nodes)) > 1:
        raise ConfigError(f"the ranks of a tensor-parallel group are on {', '.join(sorted(set(nodes)))}, and symmetric "
                          "memory does not cross nodes", where=WHERE,
                          fix="set it to false, or parallel.tensor to a divisor of the number of workers on a node")
    if device.type == "cuda":
        _share_memory(group)


def reason_against(device: torch.device) -> str | None:
    """Return why torch cannot overlap collectives with products on a device, or None."""
    try:
        import torch.distributed._symmetric_memory
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory: {error}"
    for name in OPERATORS:
        if not hasattr(torch.ops.symm_mem, name):
            return f"torch {torch.__version__} has no operator symm_mem::{name}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", device.type.upper()):
            return f"torch {torch.__version__} has a kernel of symm_mem::{name} for CUDA, not for {device.type.upper()}"
    return None


def _share_memory(group: Any) -> None:
    """Create the memory that the operators use, without that of an earlier generation.

    torch keeps it by the group's name, and after a recovery in place a new group with other ranks has the same name.

    Raises:
        ConfigError: the GPUs cannot read each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory._group_name_to_workspace_tensor.clear()
    try:
        symmetric_memory.get_symm_mem_workspace(group.group_name, min_size=1 << 20)
    except RuntimeError as error:  # no peer access, no driver support
        raise ConfigError(f"{NOT_SHARED}: {str(error).splitlines()[0]}", where=WHERE, fix="set it to false") from error
