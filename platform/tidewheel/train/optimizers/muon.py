"""Muon for the matrices of blocks, those of experts included, AdamW for other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.optim.base import Named, allocate, groups, on_cuda
from tidewheel.train.optimizers.adamw import AdamW
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class Muon(AdamW):
    """Muon for the matrices of blocks (https://arxiv.org/abs/2502.16982), AdamW for embedding, output, norms and
    routers, whose rows are an output layer over experts. Each expert's matrix is orthogonalised by itself."""

    VERSION = Version("optimizer_muon", uses=(AdamW.VERSION,))
    NOT_REPRODUCIBLE = "gathers matrices in products whose order follows the layout"
    NOT_OVERLAPPED = "exchanges matrices between workers in an update"
    HOST_TRAFFIC = 128.0  # beside its products
    STATE_NOTE = "4 of a block's matrix, 8 of others"

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate of both, on AdamW's scale (`match_rms_adamw`)."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the Nesterov momentum of matrices."""

    def build_all(self, named: Sequence[Named]) -> list[torch.optim.Optimizer]:
        from tidewheel.train.optimizers.rules import muon

        hidden = [(name, parameter) for name, parameter in named if _is_hidden(name, parameter)]
        hidden_ids = {id(parameter) for _, parameter in hidden}
        others = [(name, parameter) for name, parameter in named if id(parameter) not in hidden_ids]
        optimizers = super().build_all(others)
        if hidden:
            # the update is scaled to the size of AdamW's (section 2.2 of the paper)
            by_decay = groups(hidden, self.weight_decay)
            rule = muon.Muon(by_decay, lr=self.learning_rate, momentum=self.momentum, adjust_lr_fn="match_rms_adamw",
                             fused=on_cuda(by_decay))
            optimizers.insert(0, allocate(rule, ("momentum_buffer",)))
        return optimizers

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        return 4.0 * block_matrices + super().state_bytes(parameters - block_matrices, 0)


def _is_hidden(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix of a block, or a stack of experts' matrices."""
    is_matrix = parameter.ndim in (2, 3) and not name.endswith(("_bias", ".router.weight"))
    return name.startswith("blocks.") and is_matrix
