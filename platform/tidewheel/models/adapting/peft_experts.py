"""Low-rank updates of experts in the format of the library peft, for transformers' fused experts.

transformers joins an expert's w1 and w3 to one matrix [2F, D]. peft adapts a stack of matrices [E, O, I] by A [R E, I]
and B [O, R E] (`target_parameters`). The updates of w1 and w3, each of rank R, are one of rank 2R: B has a block for
each.

E is the number of experts, R the rank, I and O are the widths of a matrix's input and output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tidewheel.models.conversion import Conversion
from tidewheel.models.family import Model
from tidewheel.models.moe.config import MixtureOfExperts
from tidewheel.models.moe.huggingface import FUSED

Factors = tuple[torch.Tensor, torch.Tensor, float]
"""A [E, R, I], B [E, O, R] and the scale."""
LAST = "down_proj"
"""peft wraps the parameters of a module in their order, so the tensors of the others are inside of this one's."""


@dataclass(frozen=True)
class FusedParameter:
    """A parameter of transformers' experts.

    Args:
        module: name in transformers of its module.
        parameter: its name in the module.
        ours: names here of the stacks that it joins.
        conversion: between both.
        shape: [O, I] of one expert.
        experts: E.
    """

    module: str
    parameter: str
    ours: tuple[str, ...]
    conversion: Conversion
    shape: tuple[int, int]
    experts: int

    @property
    def name(self) -> str:
        """Return the name in transformers."""
        return f"{self.module}.{self.parameter}"

    @property
    def _is_transposed(self) -> bool:
        (probe,) = self.conversion.to_theirs([torch.empty(1, 2, 3, device="meta")] * len(self.ours))
        return probe.shape[2] != 3

    def join(self, parts: Mapping[str, Factors]) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return peft's A [R E, I], B [O, R E] and the scale, given the factors of some of `ours`."""
        factors = [parts.get(name) for name in self.ours]
        scale = next(part[2] for part in factors if part is not None)
        a = torch.cat([part[0] for part in factors if part is not None], dim=1)
        rank, begin = a.shape[1], 0
        blocks = []
        for part in factors:
            block = a.new_zeros(self.experts, self.shape[0] // len(self.ours), rank)
            if part is not None:
                end = begin + part[0].shape[1]
                block[:, :, begin:end] = part[1] * (part[2] / scale)
                begin = end
            blocks.append(block)
        (b,) = self.conversion.to_theirs(blocks)
        b = b.transpose(1, 2) if self._is_transposed else b
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), scale

    def split(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A [E, R, I] and B [E, O, R] of each of `ours`: the inverse of `join`.

        Args:
            a: peft's A.
            b: peft's B.
        """
        a = a.unflatten(0, (self.experts, -1))
        b = b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        blocks = self.conversion.to_ours([b.transpose(1, 2) if self._is_transposed else b])
        used = torch.stack([block.flatten(0, 1).any(dim=0) for block in blocks])
        if len(blocks) == 1 or not used.any(dim=1).all() or (used.sum(dim=0) > 1).any():
            used = torch.ones_like(used)  # A is shared
        return {name: (a[:, columns].contiguous(), block[:, :, columns].contiguous())
                for name, block, columns in zip(self.ours, blocks, used)}


def fused_parameters(config: Model) -> Sequence[FusedParameter]:
    """Return the parameters of a model's experts in transformers, which peft can adapt."""
    result: list[FusedParameter] = []
    if not isinstance(config, MixtureOfExperts):
        return result
    for layer in filter(config.has_experts, range(config.num_layers)):
        for one in config.hugging_face_weights(layer, {FUSED}):
            stacks = [name.removeprefix("ffn.experts.") for name in one.ours]
            if len(one.theirs) != 1 or not set(stacks) <= {"w1", "w2", "w3"}:
                continue
            module, _, parameter = f"{config.HUGGING_FACE_LAYER.format(layer)}{one.theirs[0]}".rpartition(".")
            width = config.expert_width
            shape = (config.dim, width) if stacks == ["w2"] else (width * len(stacks), config.dim)
            result.append(FusedParameter(module, parameter, tuple(f"blocks.{layer}.{name}" for name in one.ours), one,
                                         shape, config.num_experts))
    return result
