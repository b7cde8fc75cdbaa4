"""DoRA: a low-rank update of the directions of a matrix's rows, and a length for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tidewheel.models.adapters.lora import Lora
from tidewheel.versions import Version


class Dora(Lora):
    """Rows of W + scale B A, each scaled to a learned length (https://arxiv.org/abs/2402.09353).

    The lengths before are constants of the gradient, as in section 4.3 of the paper.
    """

    VERSION = Version("adapter_dora", uses=(Lora.VERSION,))
    EMBEDDING: ClassVar[bool] = False
    EXPERTS: ClassVar[bool] = False
    CONSTANT: ClassVar[tuple[str, ...]] = ()
    DIRECTED: ClassVar[bool] = True
    PROPOSED: ClassVar[Mapping[str, Any]] = {}

    start: Literal["zero"] = "zero"
    """A is random and B is 0."""

    def shapes(self, name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(name, inputs, outputs), "m": (outputs,)}
