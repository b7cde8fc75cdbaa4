"""Configuration of activation checkpointing. Nothing here imports torch."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config

Kind = Literal["none", "full", "every_nth", "attention", "feed_forward", "selective", "offload"]
OPTIONS: dict[str, str] = {"every": "every_nth", "recompute_products": "selective", "keep_products": "selective",
                           "activation_disk": "offload"}
"""Settings that only one kind of checkpointing uses."""


class MemoryConfig(Config):
    """Activation checkpointing, and what is on disk. These settings change memory and speed, never the result."""

    activation_checkpointing: Kind = "none"
    """What to keep of a block's forward pass until its backward pass.
    none: everything. full: the block's input; the rest is recomputed (https://arxiv.org/abs/1604.06174).
    every_nth: everything in every `every`-th block, and as full in the others. attention: everything but the inside of
    attention. feed_forward: everything but the inside of the feed-forward. selective: the input and the results of
    attention and matrix products; cheap operations are recomputed (https://arxiv.org/abs/2205.05198). offload: as full,
    with the inputs of blocks in host memory or on disk (`activation_disk`)."""
    every: Annotated[int, Field(ge=1)] | Literal["sqrt"] = 2
    """every_nth: blocks every - 1, 2 every - 1, ... keep everything; the others are recomputed. sqrt: the square root
    of the number of blocks, rounded."""
    recompute_products: int = Field(default=2, ge=0)
    """selective: also recompute every n-th matrix product of a block, as torchtitan does; 0: none."""
    keep_products: tuple[str, ...] = ()
    """selective: keep the results of these linear layers of a block and of attention, and recompute all other products:
    [wo, w2]. The names are those in the block, or the ends of them. Default: see `recompute_products`."""

    activation_disk: str = ""
    """offload: folder on a local disk of every node, such as /local_nvme, where the inputs of blocks wait. The files
    have no name, so they vanish with the process. "": in host memory."""
    optimizer_disk: str = ""
    """Folder on a local disk of every node, such as /local_nvme: optimizer state, master weights included, lives there
    and passes through memory layer by layer during an update (https://arxiv.org/abs/2104.07857). The files have no
    name, so they vanish with the process. "": in memory."""

    @pydantic.field_validator("optimizer_disk", "activation_disk")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError(f"{value!r} is not an absolute path on a local disk; nearest legal choice: "
                             f"/{value.partition('://')[2] or value}")
        return value

    @pydantic.model_validator(mode="after")
    def _used(self) -> MemoryConfig:
        changed = [name for name in OPTIONS if getattr(self, name) != type(self).model_fields[name].default]
        for name in changed:
            if self.activation_checkpointing != OPTIONS[name]:
                raise ValueError(f"{name} is for activation_checkpointing: {OPTIONS[name]}, here it is "
                                 f"{self.activation_checkpointing}")
        if "keep_products" in changed and "recompute_products" in changed:
            raise ValueError("keep_products and recompute_products both say which products to keep: give one of them")
        return self

    def interval(self, num_layers: int) -> int:
        """Return n of every_nth for a model of `num_layers` blocks."""
        return max(1, round(math.sqrt(num_layers))) if self.every == "sqrt" else self.every

    def keeps_block(self, index: int, num_layers: int) -> bool:
        """Return whether a block keeps all its activations.

        Args:
            index: of the block in the whole model.
            num_layers: of the whole model.
        """
        if self.activation_checkpointing == "every_nth":
            interval = self.interval(num_layers)
            return index % interval == interval - 1
        return self.activation_checkpointing == "none"

    def keeps_product(self, number: int, name: str) -> bool:
        """Return whether selective checkpointing keeps the result of a matrix product of a block.

        Args:
            number: counted from 1, in the order in which a block computes its products.
            name: of the linear layer in the block, "attention.wq".
        """
        if self.keep_products:
            return any(name == kept or name.endswith(f".{kept}") for kept in self.keep_products)
        return not self.recompute_products or number % self.recompute_products != 0
