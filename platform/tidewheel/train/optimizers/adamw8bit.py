"""AdamW with 8-bit moments, from torchao."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidewheel.train.optim.base import Named, groups, on_cuda
from tidewheel.train.optimizers.adamw import AdamW
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments (https://arxiv.org/abs/2110.02861)."""

    VERSION = Version("optimizer_adamw8bit", uses=(AdamW.VERSION,))
    NOT_REPRODUCIBLE = "keeps its moments in blocks, whose bounds follow the shards"
    HOST_TRAFFIC = 11 * AdamW.HOST_TRAFFIC  # it takes as long as so much traffic (tests.benchmarks.disk_offload)
    STATE_NOTE = "two codes, and two scales for 256 of them"
    COMPACT = "8-bit moments"

    paged: bool = False
    """Keep the moments of matrices in host memory. On a GPU an update brings those of one parameter at a time, so the
    GPU's memory holds hardly any (the paged optimizers of https://arxiv.org/abs/2305.14314, section 3)."""

    def build_all(self, named: Sequence[Named]) -> list[torch.optim.Optimizer]:
        from tidewheel.train.optimizers.rules import adamw8bit

        by_decay = groups(named, self.weight_decay)
        optimizer = adamw8bit.AdamW8bit(by_decay, lr=self.learning_rate, betas=self.betas, eps=self.epsilon,
                                        fused=on_cuda(by_decay), paged=self.paged)
        optimizer.prepare()
        return [optimizer]

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        return parameters * (2 + 8 / 256)  # two codes per parameter, and two fp32 scales per block of 256

    def host_bytes(self, parameters: int, block_matrices: int) -> float:
        return self.state_bytes(parameters, block_matrices) if self.paged else 0.0

    def stored(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        from tidewheel.train.optimizers.rules import adamw8bit

        return adamw8bit.stored(name, value)
