"""DoRA: a low-rank update of the directions of a matrix's rows, and a length for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tidewheel.models.adapters.lora import Lora
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn


class Dora(Lora):
    """Rows of W + scale B A, each scaled to a learned length (https://arxiv.org/abs/2402.09353).

    The lengths before are constants of the gradient, as in section 4.3 of the paper.
    """

    VERSION = Version("adapter_dora", uses=(Lora.VERSION,))
    EMBEDDING: ClassVar[bool] = False
    EXPERTS: ClassVar[bool] = False
    CONSTANT: ClassVar[tuple[str, ...]] = ()
    DIRECTED: ClassVar[bool] = True

    start: Literal["zero"] = "zero"
    """A is random and B is 0."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.low_rank import Directed

        return Directed.of(module, *self.size(name))

    def count(self, name: str, inputs: int, outputs: int) -> int:
        return super().count(name, inputs, outputs) + outputs
