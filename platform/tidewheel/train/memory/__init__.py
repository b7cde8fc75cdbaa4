"""Memory for activations: how much of a block's forward pass is kept for its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.train.memory.config import MemoryConfig

if TYPE_CHECKING:
    from tidewheel.models.decoder import Decoder

__all__ = ["MemoryConfig", "apply"]


def apply(model: Decoder, config: MemoryConfig) -> None:
    """Checkpoint the activations of the decoder's blocks, in place; before compilation and before FSDP."""
    if config.activation_checkpointing != "none":
        from tidewheel.train.memory.activations import checkpoint_blocks

        checkpoint_blocks(model, config)
