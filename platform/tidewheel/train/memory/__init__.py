"""Memory for activations: how much of a block's forward pass is kept for its backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.train.memory.config import MemoryConfig

if TYPE_CHECKING:
    import torch

    from tidewheel.models.decoder import Decoder

__all__ = ["MemoryConfig", "apply", "offload_inputs"]


def apply(model: Decoder, config: MemoryConfig) -> None:
    """Checkpoint the activations of the decoder's blocks, in place; before compilation and before FSDP."""
    if config.activation_checkpointing != "none":
        from tidewheel.train.memory.activations import checkpoint_blocks

        checkpoint_blocks(model, config)


def offload_inputs(model: Decoder, config: MemoryConfig, device: torch.device) -> None:
    """Move inputs of checkpointed blocks to host memory or to disk, in place; after compilation and before FSDP.

    Without a disk nothing changes on a CPU, whose tensors are in host memory.

    Args:
        model: a decoder to which `apply` was applied.
        config: the kind of checkpointing.
        device: that computes.
    """
    if config.activation_checkpointing != "offload" or (device.type != "cuda" and not config.activation_disk):
        return
    from tidewheel.train.memory.activations import move_inputs
    from tidewheel.train.memory.input_stores import DiskStore, HostStore

    disk = config.activation_disk
    move_inputs(model, DiskStore(Path(disk), device) if disk else HostStore(device))
